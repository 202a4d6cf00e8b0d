"""Scores answers by a reward model, reward functions and an endpoint, as step 3 does.

A reward model with another tokenizer gets prompts and answers re-tokenized.
"""

import logging

import torch

import dschat.distributed as dist
from dschat.builtin.tiny_model import resolve_model
from dschat.config import UserError
from dschat.config.reward import RewardTrainingConfig
from dschat.inference.protocol import Rollout
from dschat.models.continued_text import whole_texts
from dschat.models.load import load_config, load_score_backbone
from dschat.models.packing import pack
from dschat.models.row_length import num_positions
from dschat.models.score_model import ScoreModel
from dschat.offline.flags import PromptsConfig
from dschat.offline.model import Model
from dschat.offline.rows import Row
from dschat.rewards.combine import any_applies, combine
from dschat.rewards.reward_functions import REWARD_MODEL, RewardFunctions
from dschat.rewards.samples import Samples
from dschat.rewards.scoring import SourceScores
from dschat.rlhf.initial_checkpoints import InitialCheckpoints, find_reward
from dschat.rlhf.retokenize import Retokenizer

logger = logging.getLogger("dschat")

FLAG = "--reward_model"
_SEQUENCES = 64  # of one forward


class RewardModel:
    """A reward model, and how it reads the sequences of another model.

    Args:
        answering: the model that answers.

    Attributes:
        max_len: longest prompt + answer in the model's tokens; None: not bounded, or re-tokenized.

    Raises:
        UserError: missing, not a reward model, or unusable with the answering model's tokenizer.
    """

    def __init__(self, path: str, answering: Model, trust_remote_code: bool) -> None:
        found, tokenizer = InitialCheckpoints(""), answering.tokenizer
        find_reward(found, resolve_model(path), FLAG, tokenizer, trust_remote_code)
        for note in found.notes:
            logger.warning("%s", note)
        assert found.reward is not None
        self._name, self._path, self._trust = found.reward, path, trust_remote_code
        self._pad_id, self._dtype = tokenizer.pad_token_id, answering.dtype
        self._retokenizer = None
        self.max_len = num_positions(load_config(found.reward, FLAG, trust_remote_code))
        if found.reward_tokenizer is not None:
            self._retokenizer = Retokenizer(
                tokenizer, found.reward_tokenizer, answering.stop_ids, self.max_len
            )
            self.max_len = None
        self._model: ScoreModel | None = None

    def load(self) -> None:
        """Load the weights, unless they are there."""
        if self._model is not None:
            return
        pad_id = load_config(self._name, FLAG, self._trust).pad_token_id
        model = load_score_backbone(
            self._name,
            FLAG,
            self._dtype,
            from_base=False,
            pad_token_id=self._pad_id if pad_id is None else pad_id,
            num_tokens=0,
            trust_remote_code=self._trust,
        )
        self._model = ScoreModel(model.to(dist.device()).eval())
        self._model.check(dist.device())

    @torch.no_grad()
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
        scores = [torch.zeros(0)]
        for start in range(0, len(ids), _SEQUENCES):
            part = slice(start, start + _SEQUENCES)
            packed = pack(ids[part], [[len(row) - 1] for row in ids[part]], prompts[part])
            scores.append(self._model(packed.to(dist.device())).float().cpu())
        joined = torch.cat(scores)
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
        self._functions = RewardFunctions.of(config)
        self._functions.check_columns(columns)
        self._model = None
        if path := config.reward_model_name_or_path:
            self._model = RewardModel(path, answering, config.trust_remote_code)

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
