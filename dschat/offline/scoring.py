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
from dschat.offline.flags import GenerateConfig
from dschat.offline.rows import Row
from dschat.rewards.combine import any_applies, combine
from dschat.rewards.reward_functions import REWARD_MODEL, RewardFunctions
from dschat.rewards.samples import Samples
from dschat.rewards.scoring import SourceScores
from dschat.rlhf.initial_checkpoints import check_reward
from dschat.rlhf.retokenize import Retokenizer

logger = logging.getLogger("dschat")

FLAG = "--reward_model"


class AnswerScorer:
    """The weighted sum of all reward sources of ``config``.

    Args:
        answering: the model that answers.
        columns: of the data, for reward functions.

    Attributes:
        max_len: longest prompt + answer that can be scored, in tokens; None: any.

    Raises:
        UserError: a reward source that cannot be found, or needs a column that the data lacks; a
            reward model that cannot be used with the answering model's tokenizer.
    """

    def __init__(self, config: GenerateConfig, answering: Model, columns: list[str]) -> None:
        self._config, self._answering, self._columns = config, answering, columns
        self._functions = RewardFunctions(config)
        self._functions.check_columns(columns)
        self._checkpoint: Checkpoint | None = None
        self._retokenizer: Retokenizer | None = None
        self._model: RewardModel | None = None
        self.max_len: int | None = None
        if path := config.reward_model_name_or_path:
            self._checkpoint = Checkpoint(resolve_model(path), FLAG, config.trust_remote_code)
            tokenizer, notes = check_reward(self._checkpoint, answering.tokenizer)
            for note in notes:
                logger.warning("%s", note)
            longest = num_positions(self._checkpoint.config)
            if tokenizer is None:
                self.max_len = longest
            else:
                ends = answering.stop_ids
                self._retokenizer = Retokenizer(answering.tokenizer, tokenizer, ends, longest)

    def load(self) -> None:
        """Load the reward model, if there is one."""
        if self._checkpoint is not None:
            pad_id = self._answering.tokenizer.pad_token_id
            self._model = RewardModel(self._checkpoint, self._answering.dtype, pad_id)

    def score(self, rows: list[Row], answers: Rollout) -> list[float | None]:
        """One score per answer, (S,), S = rows x samples; None where no source gives one.

        Raises:
            UserError: a score of the reward model is not finite.
        """
        sources, repeated = [], [row for row in rows for _ in range(self._config.n)]
        if self._model is not None:
            weight, scores = self._config.reward_model_weight, self._model_scores(repeated, answers)
            sources.append(SourceScores(REWARD_MODEL, weight, scores))
        if self._functions.names:
            sources += self._functions.score(self._samples(repeated, answers)).result()
        total, _ = combine(sources, RewardTrainingConfig(), None)
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
                ids.append(read.sequence(row.ids, answer, reason == "stop", row.prompt))
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
            prompts=[row.question for row in rows],
            answers=whole_texts(self._answering.tokenizer, prompts, answers.token_ids),
            prompt_ids=prompts,
            answer_ids=answers.token_ids,
            finish_reasons=list(answers.finish_reasons),
            columns={name: [row.columns.get(name) for row in rows] for name in self._columns},
        )
