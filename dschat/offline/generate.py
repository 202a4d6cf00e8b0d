"""``dschat generate``: answers every prompt of a data set, scores the answers as step 3 does, and
writes one JSON line per prompt.

Prompts are answered in chunks, and a chunk's lines are written together. A resumed command computes
the chunk that it was killed in as a whole, so scores are rounded as in an undisturbed run. A reward
model with another tokenizer gets prompts and answers re-tokenized.
"""

import logging
import os
from contextlib import closing
from dataclasses import asdict
from functools import partial
from itertools import islice
from typing import Any

import torch

import dschat.distributed as dist
from dschat.chat.model import Model
from dschat.checkpoint.compatibility import fingerprint
from dschat.config import UserError
from dschat.config.fields import of_result
from dschat.data.tokenize import question_text
from dschat.inference.protocol import Rollout
from dschat.models.checkpoint import Checkpoint
from dschat.models.continued_text import whole_texts
from dschat.models.heads import RewardModel
from dschat.models.long_rows import num_positions
from dschat.observability import console
from dschat.offline.flags import GenerateConfig
from dschat.offline.rows import AnswerFile, AnswerLines, Progress, Prompts, Row, Rows
from dschat.rewards.reward_functions import REWARD_MODEL, RewardFunctions
from dschat.rewards.samples import Samples
from dschat.rewards.scoring import SourceScores, any_applies, combine
from dschat.rlhf.initial_checkpoints import check_reward
from dschat.rlhf.retokenize import Retokenizer

logger = logging.getLogger("dschat")

FLAG = "--reward_model"


class AnswerScorer:
    """The weighted sum of all reward sources of ``config``, which may have none.

    Args:
        answering: the model that answers.
        columns: of the data, for reward functions.

    Attributes:
        checkpoint: of the reward model, if there is one.
        max_len: longest prompt + answer that can be scored, in tokens; None: any.

    Raises:
        UserError: a reward source that cannot be found, or needs a column that the data lacks; a
            reward model that cannot be used with the answering model's tokenizer.
    """

    def __init__(self, config: GenerateConfig, answering: Model, columns: list[str]) -> None:
        self._config, self._answering, self._columns = config, answering, columns
        self._functions = RewardFunctions(config)
        self._functions.check_columns(columns)
        self.checkpoint: Checkpoint | None = None
        self._retokenizer: Retokenizer | None = None
        self._model: RewardModel | None = None
        self.max_len: int | None = None
        if path := config.reward_model_name_or_path:
            self.checkpoint = Checkpoint(path, FLAG, config.trust_remote_code)
            tokenizer, notes = check_reward(self.checkpoint, answering.tokenizer)
            for note in notes:
                logger.warning("%s", note)
            longest = num_positions(self.checkpoint.config)
            if tokenizer is None:
                self.max_len = longest
            else:
                ends = answering.stop_ids
                self._retokenizer = Retokenizer(
                    *(answering.tokenizer, tokenizer, ends, longest, config.chat_template_kwargs)
                )

    def load(self) -> None:
        """Load the reward model, if there is one."""
        if self.checkpoint is not None:
            pad_id = self._answering.tokenizer.pad_token_id
            self._model = RewardModel(self.checkpoint, self._answering.dtype, pad_id)

    def score(self, rows: list[Row], answers: Rollout) -> list[float | None] | None:
        """One score per answer, (S,), S = rows x samples; None where no source gives one. Without
        sources None in all.

        Raises:
            UserError: a score of the reward model is not finite.
        """
        if not self._config.has_rewards:
            return None
        sources, repeated = [], [row for row in rows for _ in range(self._config.n)]
        if self._model is not None:
            weight, scores = self._config.reward_model_weight, self._model_scores(repeated, answers)
            sources.append(SourceScores(REWARD_MODEL, weight, scores.tolist()))
        if self._functions.names:
            sources += self._functions.score(self._samples(repeated, answers)).result()
        total = combine(sources, None)[0].float()
        scored = any_applies(sources) & total.isfinite()
        return [
            value if known else None
            for value, known in zip(total.tolist(), scored.tolist(), strict=True)
        ]

    def close(self) -> None:
        """Stop the threads and processes of reward functions."""
        self._functions.close()

    def _model_scores(self, rows: list[Row], answers: Rollout) -> torch.Tensor:
        """The reward model's score of every answer at its last token: (S,) fp32."""
        assert self._model is not None
        read, ids = self._retokenizer, []
        for i, row in enumerate(rows):
            answer, _, reason = answers[i]
            if read is None:
                ids.append(row.ids + answer)
            else:
                finished = reason == "stop"
                ids.append(read.sequence(row.ids, answer, finished, row.prompt, row.inputs))
        shared = [len(row.ids) if read is None else 0 for row in rows]
        scores = self._model.score(ids, shared)
        if not scores.isfinite().all():
            raise UserError(
                f"{FLAG} {self._config.reward_model_name_or_path} gives scores that are NaN or "
                "infinite; try --dtype fp32, or name another reward model"
            )
        return scores

    def _samples(self, rows: list[Row], answers: Rollout) -> Samples:
        prompts = [row.ids for row in rows]
        return Samples(
            prompts=[question_text(row.prompt) for row in rows],
            answers=whole_texts(self._answering.tokenizer, prompts, answers.token_ids),
            prompt_ids=prompts,
            answer_ids=answers.token_ids,
            finish_reasons=list(answers.finish_reasons),
            columns={name: [row.columns.get(name) for row in rows] for name in self._columns},
            chats=[row.prompt for row in rows],
            decode=partial(self._answering.tokenizer.decode, clean_up_tokenization_spaces=False),
        )


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
    with closing(AnswerScorer(config, model, rows.columns)) as scorer:
        max_len = model.longest_prompt(config.max_new_tokens, scorer.max_len)
        prompts = Prompts(rows, model.tokenizer, max_len)
        if prompts.num_plain and config.text_as is None:
            how_many = f"{prompts.num_plain} of {prompts.total} prompts"
            model.warn_without_template(f"{config.path} is asked {how_many}", "--text_as")
        settings = settings_of(config, model, scorer.checkpoint)
        file = AnswerFile(config.out, settings, config.overwrite)
        if file.is_complete:
            logger.info("%s is complete: the same command has written it before", config.out)
        else:
            _write(config, model, prompts, lines, scorer, file)


def _write(
    config: GenerateConfig,
    model: Model,
    prompts: Prompts,
    lines: AnswerLines,
    scorer: AnswerScorer,
    file: AnswerFile,
) -> None:
    """Write the lines that ``file`` lacks, and complete it."""
    scorer.load()
    longest = prompts.longest + config.max_new_tokens
    generator = model.generator(config.max_num_seqs, longest)
    console.release()
    size, sampling = config.prompts_per_chunk(config.n), config.sampling(config.n)
    first = file.num_lines // size * size
    if file.num_lines:
        logger.info("%s has %s lines: resuming", config.out, f"{file.num_lines:,}")
    progress = Progress(prompts.total, first)
    remaining = islice(prompts, first, None)
    while chunk := list(islice(remaining, size)):
        indices = list(range(first, first + len(chunk)))
        answers = generator.generate([row.ids for row in chunk], sampling, indices)
        scores = scorer.score(chunk, answers)
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


def settings_of(config: GenerateConfig, model: Model, reward: Checkpoint | None) -> dict[str, Any]:
    """JSON values by flag; and what the data, the models and the functions contain."""
    counted = of_result(GenerateConfig)
    settings = {f"--{k}": v for k, v in asdict(config).items() if k in counted}
    settings["command"] = "dschat generate"
    settings["device"] = dist.device().type
    settings["--dtype"] = str(model.dtype).removeprefix("torch.")
    settings["content of --data_path"] = fingerprint(config.data_path or ())
    settings["content of --reward_fn"] = fingerprint(config.reward_fn or ())
    settings["content of --path"] = _content(model.checkpoint)
    if reward is not None:
        settings["content of --reward_model_name_or_path"] = _content(reward)
    return settings


def _content(files: Checkpoint) -> str | None:
    """Of a model's weights, configuration, template and tokenizer."""
    weights = files.weight_files
    beside = [file for kind in _BESIDE for file in weights[0].parent.glob(kind)]
    return fingerprint(sorted({str(file) for file in (*weights, *beside)}))
