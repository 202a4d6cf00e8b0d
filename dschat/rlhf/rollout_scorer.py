"""Combines the scores of all sources, reward model and reward functions, into one per answer."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import dschat.distributed as dist
from dschat.config import RLHFConfig, UserError
from dschat.rewards.reward_functions import REWARD_MODEL, RewardFunctions
from dschat.rewards.scoring import (
    RunningScale,
    Scoring,
    SourceScores,
    any_applies,
    combine,
    source_means,
)
from dschat.rlhf.batching import Moves, micro_batches, plan_moves
from dschat.rlhf.engine import DeepSpeedRLHFEngine
from dschat.rlhf.experience import Experience

logger = logging.getLogger("dschat")


class RolloutScorer:
    """Scores answers by all sources: the reward model and reward functions.

    One per run, with the running scale of rewards.
    """

    def __init__(
        self,
        engine: DeepSpeedRLHFEngine,
        args: RLHFConfig,
        functions: RewardFunctions,
        others: Sequence[str] = (),
    ) -> None:
        """``others``: names of further sources, of weight 1."""
        has_model = engine.reward is not None or engine.teacher is not None
        if not (has_model or functions.names or others):
            raise UserError(
                "nothing scores the answers: name a reward model (--critic_model_name_or_path), or "
                "give --reward_fn or reward_fns=[...]"
            )
        self.args, self.functions = args, functions
        self.scale = RunningScale()
        self._engine = engine
        self._warned = False  # of answers without a score
        weights = {} if engine.reward is None else {REWARD_MODEL: args.reward_model_weight}
        weights |= functions.weights | dict.fromkeys(others, 1.0)
        terms = [f"{name} x {w:g}" if w else f"{name} (logged)" for name, w in weights.items()]
        bound = "not clipped" if self.clip is None else f"clipped to +-{self.clip:g}"
        logger.info("score: %s, %s", " + ".join(terms) or "none, the teacher alone", bound)

    @property
    def clip(self) -> float | None:
        """The bound that clips an answer's score in its reward; None: not clipped."""
        alone = self._engine.reward is not None and not any(self.functions.weights.values())
        return self.args.clip_where(model_alone=alone)

    def state_dict(self) -> dict[str, Any]:
        """Collective. JSON-able state that the next rollout depends on, the same on all ranks."""
        return {"scale": self.scale.state_dict(), "programs": self.functions.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale.load_state_dict(state["scale"])
        self.functions.load_state_dict(state.get("programs", {}))

    @torch.no_grad()
    def reward_model(self, e: Experience, size: int) -> list[SourceScores]:
        """Collective. The reward model's scores, if there is one; see `Collected.sources`."""
        if self._engine.reward is None:
            return []
        scores = torch.zeros(e.num_sequences)
        parts = micro_batches(self._engine, e, list(range(e.num_sequences)), size)
        values = [self._engine.score(e.pick_or_dummy(part)) for part in parts]
        on_host = torch.cat(values).cpu().split([len(value) for value in values])
        for part, value in zip(parts, on_host, strict=True):
            if part:
                scores[part] = value
        return [SourceScores(REWARD_MODEL, self.args.reward_model_weight, scores)]

    def combined(
        self, e: Experience, sources: list[SourceScores]
    ) -> tuple[Experience, dict[str, float]]:
        """Collective. ``e`` with scores, without the answers that failed; and metrics.

        Without a source, where a teacher is all that is learned from, all scores are 0.
        """
        if not sources:
            return e, {}
        metrics = source_means("objective/scores", sources, with_std=True)
        metrics |= self.functions.logged()
        scores, token_scores = combine(sources, self.scale if self.args.normalize_reward else None)
        e.scores = scores.float()
        for row, values in enumerate(token_scores or ()):
            e.token_scores[row, : len(values)] = torch.tensor(values)
        e.scored = any_applies(sources)
        failed = torch.zeros(e.num_sequences, dtype=torch.bool)
        for source in sources:
            if source.name != REWARD_MODEL and source.weight:
                failed |= source.scores.isnan()
        counts = [float(failed.sum()), float((~e.scored & ~failed).sum()), float(len(failed))]
        num_failed, num_declined, total = dist.sum_floats(counts)
        if num_failed or num_declined:
            metrics["rollout/unscored"] = num_failed + num_declined
        if num_declined and not self._warned:
            self._warned = True
            logger.warning(
                "%.0f of %.0f answers have no score: every source returned None; such answers are "
                "%s (counted as rollout/unscored)",
                *(num_declined, total),
                "learned from the teacher alone" if self.args.has_teacher else "not trained on",
            )
        if num_failed:
            e = e.pick((~failed).nonzero().flatten().tolist())
        return e, metrics


@dataclass
class Collected:
    """Answers whose reward functions may still run. Score them once, with `score` or `sources`.

    Attributes:
        experience: this rank's answers; `score` fills in their scores.
        num_prompts: over all ranks.
        metrics: of the generation; after `score`, of the scores too.
        scorer: None if the experience has its scores.
        scoring: by reward functions.
        others: scores that the answers came with.
        moves: of the answers, after their scoring had begun.
    """

    experience: Experience
    num_prompts: int
    metrics: dict[str, float]
    scorer: RolloutScorer | None = None
    scoring: Scoring | None = None
    others: Sequence[SourceScores] = ()
    moves: Moves | None = None

    def cut_into(self, num_mini_batches: int, samples: int) -> None:
        """Plan an epoch's optimizer steps, the same on all ranks, with all answers to a prompt in
        one step, which then computes the prompt once; but not where a rank would have no answers
        in some step.
        """
        e = self.experience
        e.num_mini_batches = num_mini_batches
        if self.num_prompts % (num_mini_batches * dist.world_size()) == 0:
            e.together = samples

    def balance(self, mini_batch: np.ndarray, samples: int, budget: int) -> None:
        """Collective. Move answers between ranks; see `plan_moves`."""
        self.moves = plan_moves(self.experience, mini_batch, samples, budget)
        self.experience = self.moves.experience(self.experience)

    def score(self) -> Experience:
        """Collective. Wait for reward functions and fill in the scores, not clipped.

        A sequence that a weighted reward function failed on is dropped. A sequence that every
        weighted source declined (None) stays, but is not ``scored``. A NaN of the reward model
        stays, for the trainer to detect.

        Raises ``RewardError`` on all ranks where a reward function failed on one of them.
        """
        if (scorer := self.scorer) is not None:
            sources = self.sources(scorer.args.per_device_training_batch_size)
            self.experience, metrics = scorer.combined(self.experience, sources)
            self.metrics |= metrics
        return self.experience

    def sources(self, size: int) -> list[SourceScores]:
        """Collective. Every source's scores, after waiting for reward functions.

        ``size``: sequences per forward of the reward model, unless there is a token budget.
        """
        assert self.scorer is not None, "already scored"
        scorer, self.scorer = self.scorer, None
        of_model = scorer.reward_model(self.experience, size)
        others = [] if self.scoring is None else self.scoring.result()
        others += self.others
        if self.moves is not None:
            others = [self.moves.scores(source) for source in others]
        return of_model + others
