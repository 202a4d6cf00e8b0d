"""``dschat generate``: answers every prompt of a data set, and writes one JSON line per prompt.

Prompts are answered in chunks, and a chunk's lines are written together. A resumed command computes
the chunk that it was killed in as a whole, so scores are rounded as in an undisturbed run.
"""

import logging
import os
from dataclasses import asdict
from itertools import islice
from typing import Any

import dschat.distributed as dist
from dschat.builtin.tiny_model import resolve_model
from dschat.chat.model import Model
from dschat.checkpoint.fingerprint import fingerprint
from dschat.config import UserError
from dschat.config.fields import of_result
from dschat.models.checkpoint_files import CheckpointFiles
from dschat.observability import console
from dschat.offline.answer_file import AnswerFile, AnswerLines
from dschat.offline.flags import GenerateConfig
from dschat.offline.rows import Progress, Prompts, Rows
from dschat.offline.scoring import AnswerScorer

logger = logging.getLogger("dschat")

_BESIDE = ("*.json", "*.jinja", "*.model", "*.txt", "*.py")  # a model's weights


def generate(config: GenerateConfig) -> None:
    """Answer the prompts of ``config.data_path`` into ``config.out``; resume if it was begun.

    Raises:
        UserError: a wrong flag, model, reward source, data or output file, before weights load.
    """
    check_out(config)
    model = Model.find(config.path, config.dtype, config.trust_remote_code, **config.template_flags)
    rows = Rows(config)
    lines = AnswerLines(config, rows, model.tokenizer)
    scorer = None
    if config.has_rewards:
        scorer = AnswerScorer(config, model, rows.columns)
    try:
        bound = None if scorer is None else scorer.max_len
        max_len = model.longest_prompt(config.max_new_tokens, bound)
        prompts = Prompts(rows, model.tokenizer, max_len)
        file = AnswerFile(config.out, settings_of(config, model), config.overwrite)
        if file.is_complete:
            logger.info("%s is complete: the same command has written it before", config.out)
        else:
            _write(config, model, prompts, lines, scorer, file)
    finally:
        if scorer is not None:
            scorer.close()


def _write(
    config: GenerateConfig,
    model: Model,
    prompts: Prompts,
    lines: AnswerLines,
    scorer: AnswerScorer | None,
    file: AnswerFile,
) -> None:
    """Write the lines that ``file`` lacks, and complete it."""
    if scorer is not None:
        scorer.load()
    longest = prompts.longest + config.max_new_tokens
    generator = model.generator(config.max_num_seqs, longest)
    console.release()
    size, sampling = config.prompts_per_chunk(config.n), config.sampling(config.n)
    first = file.num_lines // size * size
    if file.num_lines:
        logger.info("%s has %s lines: resuming", config.out, f"{file.num_lines:,}")
    progress = Progress(prompts.total, first, "generate")
    remaining = islice(prompts, first, None)
    while chunk := list(islice(remaining, size)):
        indices = list(range(first, first + len(chunk)))
        answers = generator.generate([row.ids for row in chunk], sampling, indices)
        scores = scorer.score(chunk, answers) if scorer is not None else None
        written = max(0, file.num_lines - first)
        file.append(lines.of(chunk, answers, scores)[written:])
        progress.advance(len(chunk), answers.num_tokens)
        first += len(chunk)
    progress.close()
    file.finish()
    logger.info("%s; wrote %s", progress.line(), config.out)


def check_out(config: GenerateConfig) -> None:
    """Raise ``UserError`` where ``--overwrite`` would replace the data."""
    replaces = config.overwrite and os.path.exists(config.out)
    for path in (config.data_path or ()) if replaces else ():
        if os.path.exists(path) and os.path.samefile(path, config.out):
            raise UserError(f"--out {config.out} is the data itself; name another file")


def settings_of(config: GenerateConfig, model: Model) -> dict[str, Any]:
    """JSON values by flag; and what the data, the models and the functions contain."""
    counted = of_result(GenerateConfig)
    settings = {f"--{k}": v for k, v in asdict(config).items() if k in counted}
    settings["command"] = "dschat generate"
    settings["device"] = dist.device().type
    settings["--dtype"] = str(model.dtype).removeprefix("torch.")
    settings["content of --data_path"] = fingerprint(config.data_path or ())
    settings["content of --reward_fn"] = fingerprint(config.reward_fn or ())
    settings["content of --path"] = _content(model.checkpoint)
    if config.reward_model_name_or_path:
        reward = CheckpointFiles(resolve_model(config.reward_model_name_or_path), "--reward_model")
        settings["content of --reward_model_name_or_path"] = _content(reward)
    return settings


def _content(files: CheckpointFiles) -> str | None:
    """Of a model's weights, configuration, template and tokenizer."""
    weights = files.weight_files
    beside = [file for kind in _BESIDE for file in weights[0].parent.glob(kind)]
    return fingerprint(sorted({str(file) for file in (*weights, *beside)}))
