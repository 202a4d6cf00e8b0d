"""Scores answers by a reward model, reward functions and an endpoint, as step 3 does.

A reward model with another tokenizer gets prompts and answers re-tokenized.
"""

import logging

import torch

from dschat.builtin.tiny_model import resolve_model
from dschat.chat.model import Model
from dschat.config import UserError
from dschat.config.reward import RewardTrainingConfig
from dschat.inference.protocol import Rollout
from dschat.models.checkpoint import Checkpoint
from dschat.models.continued_text import whole_texts
from dschat.models.row_length import num_positions
from dschat.models.score_model import RewardModel
from dschat.offline.flags import PromptsConfig
from dschat.offline.rows import Row
from dschat.rewards.combine import any_applies, combine
from dschat.rewards.reward_functions import REWARD_MODEL, RewardFunctions
from dschat.rewards.samples import Samples
from dschat.rewards.scoring import SourceScores
from dschat.rlhf.initial_checkpoints import check_reward
from dschat.rlhf.retokenize import Retokenizer

logger = logging.getLogger("dschat")

FLAG = "--reward_model"


class ModelScorer:
    """A reward model, and how it reads the sequences of another model.

    Args:
        answering: the model that answers.

    Attributes:
        max_len: longest prompt + answer in the model's tokens; None: not bounded, or re-tokenized.

    Raises:
        UserError: missing, not a reward model, or unusable with the answering model's tokenizer.
    """

    def __init__(self, path: str, answering: Model, trust_remote_code: bool) -> None:
        self._checkpoint = Checkpoint(resolve_model(path), FLAG, trust_remote_code)
        self._path, self._answering = path, answering
        tokenizer, notes = check_reward(self._checkpoint, answering.tokenizer)
        for note in notes:
            logger.warning("%s", note)
        self._retokenizer = None
        self.max_len = num_positions(self._checkpoint.config)
        if tokenizer is not None:
            self._retokenizer = Retokenizer(
                answering.tokenizer, tokenizer, answering.stop_ids, self.max_len
            )
            self.max_len = None
        self._model: RewardModel | None = None

    def load(self) -> None:
        """Load the weights, unless they are there."""
        if self._model is None:
            pad_id = self._answering.tokenizer.pad_token_id
            self._model = RewardModel(self._checkpoint, self._answering.dtype, pad_id)

    def score(self, rows: list[Row], answers: Rollout) -> torch.Tensor:
        """The score of every answer at its last token: (S,) fp32, S = rows x samples.

        Raises:
            UserError: a score is not finite.
        """
        assert self._model is not None, "call load first"
        n = len(answers) // max(len(rows), 1)
        repeated = [row for row in rows for _ in range(n)]
        read, ids = self._retokenizer, []
        for i, row in enumerate(repeated):
            answer, _, reason = answers[i]
            if read is None:
                ids.append(row.ids + answer)
            else:
                ids.append(read.sequence(row.ids, answer, reason == "stop", row.prompt))
        prompts = [len(row.ids) if read is None else 0 for row in repeated]  # 0: not shared
        joined = self._model.score(ids, prompts)
        if not joined.isfinite().all():
            raise UserError(
                f"{FLAG} {self._path} gives scores that are NaN or infinite; try --dtype fp32, or "
                "name another reward model"
            )
        return joined


class AnswerScorer:
    """The weighted sum of all reward sources.

    Args:
        columns: of the data, for reward functions.

    Raises:
        UserError: a reward source that cannot be found, or needs a column that the data lacks.
    """

    def __init__(self, config: PromptsConfig, answering: Model, columns: list[str]) -> None:
        self._config, self._tokenizer, self._columns = config, answering.tokenizer, columns
        self._functions = RewardFunctions(config)
        self._functions.check_columns(columns)
        self._model = None
        if path := config.reward_model_name_or_path:
            self._model = ModelScorer(path, answering, config.trust_remote_code)

    @property
    def max_len(self) -> int | None:
        """Longest prompt + answer that can be scored; None: any."""
        return None if self._model is None else self._model.max_len

    def load(self) -> None:
        """Load the reward model, if there is one."""
        if self._model is not None:
            self._model.load()

    def score(self, rows: list[Row], answers: Rollout) -> list[float | None]:
        """One score per answer, (S,); None where no source gives one."""
        sources = []
        if self._model is not None:
            weight = self._config.reward_model_weight
            sources.append(SourceScores(REWARD_MODEL, weight, self._model.score(rows, answers)))
        if self._functions.names:
            samples = self._samples(rows, answers)
            sources += self._functions.score(samples).result()
        total, _ = combine(sources, RewardTrainingConfig(), None)
        scored = any_applies(sources) & total.isfinite()
        return [
            value if known else None
            for value, known in zip(total.tolist(), scored.tolist(), strict=True)
        ]

    def close(self) -> None:
        """Stop the threads and processes of reward functions."""
        self._functions.close()

    def _samples(self, rows: list[Row], answers: Rollout) -> Samples:
        n = len(answers) // max(len(rows), 1)
        repeated = [row for row in rows for _ in range(n)]
        prompts = [row.ids for row in repeated]
        return Samples(
            prompts=[row.question for row in repeated],
            answers=whole_texts(self._tokenizer, prompts, answers.token_ids),
            prompt_ids=prompts,
            answer_ids=answers.token_ids,
            finish_reasons=list(answers.finish_reasons),
            columns={name: [row.columns.get(name) for row in repeated] for name in self._columns},
        )
