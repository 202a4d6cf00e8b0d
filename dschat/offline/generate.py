"""``dschat generate``: answers every prompt of a data set, and writes one JSON line per prompt.

Prompts are answered in chunks, and a chunk's lines are written together. A resumed command computes
the chunk that it was killed in as a whole, so scores are rounded as in an undisturbed run.
"""

import logging
from itertools import islice

from dschat.observability import console
from dschat.offline.answer_file import AnswerFile
from dschat.offline.answer_lines import AnswerLines
from dschat.offline.flags import GenerateConfig
from dschat.offline.model import Model
from dschat.offline.progress import Progress
from dschat.offline.rows import Prompts, Rows
from dschat.offline.scoring import AnswerScorer
from dschat.offline.settings import check_out, settings_of

logger = logging.getLogger("dschat")


def generate(config: GenerateConfig) -> None:
    """Answer the prompts of ``config.data_path`` into ``config.out``; resume if it was begun.

    Raises:
        UserError: a wrong flag, model, reward source, data or output file, before weights load.
    """
    check_out(config)
    model = Model.find(config.path, config.dtype, config.trust_remote_code)
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
    generator = model.generator(config, prompts.longest)
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
