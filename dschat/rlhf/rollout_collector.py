"""Collects rollouts: generates answers and has all sources score them.

Reward functions score one batch of answers while the next is generated.
"""

import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

import dschat.distributed as dist
from dschat.inference.protocol import Generator, Rollout, SamplingParams
from dschat.models.continued_text import whole_texts
from dschat.rewards.combine import joined_scores
from dschat.rewards.reward_functions import SourceScores
from dschat.rewards.samples import Samples
from dschat.rlhf.balance import Moves, plan_moves
from dschat.rlhf.early_scoring import EarlyScoring
from dschat.rlhf.engine import DeepSpeedRLHFEngine
from dschat.rlhf.experience import Experience, from_rollout, joined
from dschat.rlhf.metrics import generation_metrics
from dschat.rlhf.prompt_table import PromptTable
from dschat.rlhf.rollout_scorer import RolloutScorer


class ScoreCall(Protocol):
    """Scores of a part of a rollout that are being computed; see `Pending`."""

    def result(self) -> list[SourceScores]: ...


class PendingRollout:
    """Answers whose reward functions may still run. Score them once, with `score` or `sources`.

    Attributes:
        experience: this rank's answers; `score` fills in their scores.
        num_prompts: over all ranks.
        metrics: of the generation; after `score`, of the scores too.
    """

    def __init__(
        self,
        experience: Experience,
        num_prompts: int,
        metrics: dict[str, float],
        scorer: RolloutScorer | None = None,
        calls: Sequence[ScoreCall] = (),
    ) -> None:
        """``scorer``: None if the experience has its scores. ``calls``: of reward functions."""
        self.experience, self.num_prompts, self.metrics = experience, num_prompts, metrics
        self._scorer, self.calls = scorer, calls
        self._moves: Moves | None = None  # of the answers, after their calls had started

    def balance(self, mini_batch: np.ndarray, samples: int, budget: int) -> None:
        """Collective. Move answers between ranks; see `plan_moves`."""
        self._moves = plan_moves(self.experience, mini_batch, samples, budget)
        self.experience = self._moves.experience(self.experience)

    def score(self) -> Experience:
        """Collective. Wait for reward functions and fill in the scores, not clipped.

        A sequence that a weighted reward function failed on is dropped. A sequence that every
        weighted source declined (None) stays, but is not ``scored``. A NaN of the reward model
        stays, for the trainer to detect.

        Raises ``RewardError`` on all ranks where a reward function failed on one of them.
        """
        if (scorer := self._scorer) is not None:
            sources = self.sources(scorer.args.per_device_training_batch_size)
            self.experience, metrics = scorer.combined(self.experience, sources)
            self.metrics |= metrics
        return self.experience

    def sources(self, size: int) -> list[SourceScores]:
        """Collective. Every source's scores, after waiting for reward functions.

        ``size``: sequences per forward of the reward model, unless there is a token budget.
        """
        assert self._scorer is not None, "already scored"
        scorer, self._scorer = self._scorer, None
        sources = scorer.reward_model(self.experience, size)
        of_programs = joined_scores([call.result() for call in self.calls])
        if self._moves is not None:
            of_programs = self._moves.scores(of_programs)
        return sources + of_programs


class RolloutSource:
    """Where an iteration gets its answers from."""

    def generate(self, prompts: PromptTable, sampling: SamplingParams) -> PendingRollout:
        """Collective. The answers of an iteration that takes ``prompts`` of this rank."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Collective. JSON-able state that the next rollout depends on, the same on all ranks."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`."""


class RolloutCollector(RolloutSource):
    """Generates the answers of a rollout."""

    def __init__(self, engine: DeepSpeedRLHFEngine, scorer: RolloutScorer) -> None:
        self.scorer = scorer
        self._engine, self._functions = engine, scorer.functions

    def generate(
        self,
        prompts: PromptTable,
        sampling: SamplingParams,
        before: int = 0,
    ) -> PendingRollout:
        """Collective. The actor's answers to ``prompts``, ``sampling.n`` times each.

        The caller may do other work before `PendingRollout.score`, while reward functions run.
        ``before``: number of prompts, over all ranks, in earlier rounds of the same rollout.
        """
        started = time.perf_counter()
        counts = dist.gather_objects(len(prompts.ids))
        first = before + sum(counts[: dist.rank()])
        # One call, unless reward functions overlap with the next. The same number on every rank:
        # tensor-parallel ranks generate together.
        calls = self.scorer.args.generation_batches if self._functions.overlaps else 1
        with self._engine.rollout_mode() as generator:
            rollout = self.answers_of(generator, prompts, sampling, first, calls)
            rollout.metrics |= generation_metrics(self._engine.rollout.last_refresh, generator)
        rollout.num_prompts = sum(counts)
        rollout.metrics["time/generate_s"] = time.perf_counter() - started
        return rollout

    def answers_of(
        self,
        generator: Generator,
        prompts: PromptTable,
        sampling: SamplingParams,
        first: int,
        calls: int = 1,
    ) -> PendingRollout:
        """Collective. Answer ``prompts`` in ``calls`` calls of ``generator``, and start the reward
        functions on the answers of each.

        ``first``: the number of this rank's first prompt among those of all ranks.
        """
        parts: list[PendingRollout] = []
        size = max(1, -(-len(prompts.ids) // calls))
        for start in range(0, calls * size, size):
            rows = list(range(len(prompts.ids)))[start : start + size]
            part, numbers = prompts.pick(rows), [first + row for row in rows]
            early = self.early_scoring(part, len(rows))
            answered = None if early is None else early.add
            rollout = generator.generate(part.ids, sampling, numbers, answered=answered)
            parts.append(self.pending(part, rollout, numbers[0] if numbers else 0, early))
        e = joined([part.experience for part in parts])
        pending = [call for part in parts for call in part.calls]
        return PendingRollout(e, len(prompts.ids), {}, self.scorer, pending)

    def early_scoring(self, prompts: PromptTable, count: int) -> EarlyScoring | None:
        """Scores the answers to ``count`` of ``prompts`` before all are there; None where no source
        of rewards would.
        """
        if not (self._functions.takes_parts and count):
            return None
        timeout_s = self.scorer.args.reward_timeout_s
        return EarlyScoring(self._functions, timeout_s, self._samples, prompts, count)

    def pending(
        self,
        prompts: PromptTable,
        rollout: Rollout,
        first: int,
        early: EarlyScoring | None = None,
        rows: Sequence[int] | None = None,
    ) -> PendingRollout:
        """Start the reward functions on the answers to ``prompts``, the first of which has the
        number ``first``.

        ``early``: has started some of them. ``rows``: of ``prompts`` there; default: all.
        """
        n = len(rollout) // max(len(prompts.ids), 1)
        repeated, pad_id = prompts.repeated(n), self._engine.tokenizer.pad_token_id
        e = from_rollout(repeated.ids, rollout, pad_id, first * n, repeated.sources)
        calls = []
        if early is not None:
            rows = range(len(prompts.ids)) if rows is None else rows
            calls.append(early.finish(rows, rollout, repeated))
        elif self._functions.names:
            timeout_s = self.scorer.args.reward_timeout_s
            calls.append(self._functions.score(self._samples(repeated, rollout), timeout_s))
        return PendingRollout(e, len(prompts.ids), {}, self.scorer, calls)

    def prompt_texts(self, prompts: PromptTable) -> list[str]:
        """The texts of prompts; decoded where only their ids are known."""
        decode = self._engine.tokenizer.decode
        return prompts.texts or [decode(ids, skip_special_tokens=True) for ids in prompts.ids]

    def _samples(self, prompts: PromptTable, rollout: Rollout) -> Samples:
        """``prompts``: one for each answer of ``rollout``."""
        return Samples(
            prompts=self.prompt_texts(prompts),
            answers=whole_texts(self._engine.tokenizer, prompts.ids, rollout.token_ids),
            prompt_ids=prompts.ids,
            answer_ids=rollout.token_ids,
            finish_reasons=list(rollout.finish_reasons),
            columns=prompts.columns,
        )
