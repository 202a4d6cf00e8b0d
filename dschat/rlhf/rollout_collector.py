"""Collects rollouts: generates answers, scores them by all sources, samples dynamically.

Reward functions score one batch of answers while the next is generated.
"""

import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import dschat.distributed as dist
from dschat.config import RLHFConfig, UserError
from dschat.data.batches import position_of, seek
from dschat.inference.protocol import Generator, Rollout, SamplingParams
from dschat.losses import clip_scores, group_has_variance, group_stats
from dschat.rewards.combine import (
    RunningScale,
    any_applies,
    combine,
    joined_scores,
    source_means,
)
from dschat.rewards.reward_functions import REWARD_MODEL, Pending, RewardPrograms, SourceScores
from dschat.rewards.samples import Samples
from dschat.rlhf.balance import Moves, plan_moves
from dschat.rlhf.engine import DeepSpeedRLHFEngine
from dschat.rlhf.experience import Experience, from_rollout, joined
from dschat.rlhf.metrics import generation_metrics
from dschat.rlhf.prompt_table import PromptBatch, PromptTable
from dschat.rlhf.scoring import reward_model_scores

logger = logging.getLogger("dschat")


@dataclass
class Collected:
    """A rollout in progress: its answers, and the calls of reward functions under way."""

    experience: Experience
    num_prompts: int  # over all ranks
    metrics: dict[str, float] = field(default_factory=dict)
    pending: list[Pending] | None = None  # None: already scored
    moves: Moves | None = None  # of the answers, after their reward functions had started

    def balance(self, mini_batch: np.ndarray, samples: int, budget: int) -> None:
        """Collective. Move answers between ranks; see `plan_moves`."""
        self.moves = plan_moves(self.experience, mini_batch, samples, budget)
        self.experience = self.moves.experience(self.experience)


class Collector:
    """Collects rollouts; one per run, with the running scale of rewards and the prompt queue."""

    def __init__(
        self,
        engine: DeepSpeedRLHFEngine,
        args: RLHFConfig,
        programs: RewardPrograms,
        more_prompts: Iterator[PromptBatch] | None = None,
    ) -> None:
        """``more_prompts``: what dynamic sampling draws from where a rollout is not full. Without
        it, or once it is exhausted on any rank, the same prompts are sampled again.
        """
        if engine.reward is None and not programs.names:
            raise UserError(
                "nothing scores the answers: name a reward model (--critic_model_name_or_path), or "
                "give --reward_fn, --reward_url or reward_fns=[...]"
            )
        self.scale = RunningScale()
        self._engine = engine
        self._args = args
        self._programs = programs
        self._more = more_prompts
        self._queue = PromptTable()  # of all ranks, drawn from `more_prompts`, not yet used
        self._warned = False  # of answers without a score
        self._announce()

    def _announce(self) -> None:
        weights = {} if self._engine.reward is None else {REWARD_MODEL: self._model_weight}
        weights |= self._programs.weights
        terms = [f"{name} x {w:g}" if w else f"{name} (logged)" for name, w in weights.items()]
        bound = "not clipped" if self.clip is None else f"clipped to +-{self.clip:g}"
        logger.info("score: %s, %s", " + ".join(terms), bound)

    @property
    def _model_weight(self) -> float:
        return self._args.reward_model_weight

    @property
    def clip(self) -> float | None:
        """The bound that clips an answer's score in its reward; None: not clipped."""
        alone = self._engine.reward is not None and not any(self._programs.weights.values())
        return self._args.clip_where(model_alone=alone)

    def state_dict(self) -> dict[str, Any]:
        """Collective. JSON-able state that the next rollout depends on, the same on all ranks."""
        return {
            "scale": self.scale.state_dict(),
            "left": vars(self._queue),
            "taken": position_of(self._more),
            "programs": self._programs.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale.load_state_dict(state["scale"])
        self._programs.load_state_dict(state.get("programs", {}))
        self._queue = PromptTable(**state["left"])
        seek(self._more, state["taken"])

    @property
    def has_programs(self) -> bool:
        """Whether reward functions score, with or without a reward model."""
        return bool(self._programs.names)

    def collect(self, batch: PromptBatch, sampling: SamplingParams) -> Collected:
        """Collective. Answer ``batch``, ``sampling.n`` times each; `score` comes next.

        The caller may do other work in between, while reward functions run.
        """
        prompts = PromptTable.of(batch)
        if self._args.dynamic_sampling:
            return self._until_full(prompts, sampling)
        total, first = _total_and_first(len(prompts.ids))
        return self._answer(prompts, sampling, first, total)

    def score(self, collected: Collected) -> None:
        """Collective. Fill in the scores of all sources, not clipped.

        A sequence that a weighted reward function failed on is dropped. A sequence that every
        weighted source declined (None) stays, but is not ``scored``. A NaN of the reward model
        stays, for the trainer to detect.

        Raises ``RewardError`` on all ranks where a reward function failed on one of them.
        """
        if collected.pending is None:
            return
        e, args = collected.experience, self._args
        sources = self.sources_of(collected, args.per_device_training_batch_size)
        collected.metrics |= source_means("objective/scores", sources)
        scores, token_scores = combine(sources, args, self.scale)
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
            collected.metrics["rollout/unscored"] = num_failed + num_declined
        if num_declined and not self._warned:
            self._warned = True
            logger.warning(
                "%.0f of %.0f answers have no score: every source returned None; such answers are "
                "not trained on (counted as rollout/unscored)",
                num_declined,
                total,
            )
        if num_failed:
            collected.experience = e.pick((~failed).nonzero().flatten().tolist())

    def sources_of(self, collected: Collected, size: int) -> list[SourceScores]:
        """Collective. Every source's scores, after waiting for reward functions; to be called once.

        ``size``: sequences per forward of the reward model, unless there is a token budget.
        """
        sources, pending = [], collected.pending
        assert pending is not None, "already scored"
        collected.pending = None
        if self._engine.reward is not None:
            scores = reward_model_scores(self._engine, collected.experience, size)
            sources.append(SourceScores(REWARD_MODEL, self._model_weight, scores))
        of_programs = joined_scores([self._programs.finish(part) for part in pending])
        if collected.moves is not None:
            of_programs = collected.moves.scores(of_programs)
        return sources + of_programs

    def answers_of(
        self,
        generator: Generator,
        prompts: PromptTable,
        sampling: SamplingParams,
        first: int,
        calls: int = 1,
    ) -> Collected:
        """Collective. Answer ``prompts`` in ``calls`` calls of ``generator``, and start the reward
        functions on the answers of each.

        ``first``: the number of this rank's first prompt among those of all ranks.
        """
        parts, pending, pad_id = [], [], self._engine.tokenizer.pad_token_id
        size = max(1, -(-len(prompts.ids) // calls))
        for start in range(0, calls * size, size):
            rows = list(range(len(prompts.ids)))[start : start + size]
            part, numbers = prompts.pick(rows), [first + row for row in rows]
            rollout = generator.generate(part.ids, sampling, numbers)
            repeated = part.repeated(sampling.n)
            number = numbers[0] * sampling.n if numbers else 0
            parts.append(from_rollout(repeated.ids, rollout, pad_id, number, repeated.sources))
            if self._programs.names:
                pending.append(self._programs.start(self._samples(repeated, rollout)))
        return Collected(joined(parts), len(prompts.ids), {}, pending)

    def _answer(
        self, prompts: PromptTable, sampling: SamplingParams, first: int, total: int
    ) -> Collected:
        """Collective. The actor's answers; see `answers_of`."""
        started = time.perf_counter()
        # One call, unless reward functions overlap with the next. The same number on every rank:
        # tensor-parallel ranks generate together.
        calls = self._args.generation_batches if self._programs.overlaps else 1
        with self._engine.rollout_mode() as generator:
            collected = self.answers_of(generator, prompts, sampling, first, calls)
            collected.metrics = generation_metrics(self._engine.rollout.last_refresh, generator)
        collected.num_prompts = total
        collected.metrics["time/generate_s"] = time.perf_counter() - started
        return collected

    def _samples(self, prompts: PromptTable, rollout: Rollout) -> Samples:
        """``prompts``: one for each answer of ``rollout``."""
        decode = self._engine.tokenizer.batch_decode
        return Samples(
            prompts=prompts.texts or decode(prompts.ids, skip_special_tokens=True),
            answers=decode(rollout.token_ids, skip_special_tokens=True),
            prompt_ids=prompts.ids,
            answer_ids=rollout.token_ids,
            finish_reasons=list(rollout.finish_reasons),
            columns=prompts.columns,
        )

    # -- dynamic sampling --------------------------------------------------------------------------

    def _until_full(self, prompts: PromptTable, sampling: SamplingParams) -> Collected:
        """Collective. Sample in rounds until enough prompts have answers of different scores.

        DAPO (arXiv 2503.14476, section 3.2). The first such prompts in the order of the rounds are
        kept, whichever rank has them. Later rounds sample as many prompts as are likely missing.
        """
        first_prompts, (wanted, _) = prompts, _total_and_first(len(prompts.ids))
        kept: list[int] = []  # numbers of prompts, over all ranks
        parts: list[Experience] = []
        sums: dict[str, float] = {}
        sampled = rounds = 0
        while rounds < self._args.max_sampling_rounds and len(kept) < wanted:
            if rounds:
                likely = math.ceil((wanted - len(kept)) * sampled / max(len(kept), 1))
                prompts = self._next_prompts(first_prompts, min(wanted, likely))
            total, first = _total_and_first(len(prompts.ids))
            collected = self._answer(prompts, sampling, sampled + first, total)
            self.score(collected)
            kept += self._with_variance(collected.experience, sampled, total, sampling.n)
            parts.append(collected.experience)
            _accumulate(sums, collected.metrics, weight=total)
            sampled, rounds = sampled + total, rounds + 1
        kept = kept[:wanted]
        every = joined(parts)
        score, num_scored = dist.sum_floats(
            [float(every.scores.double().sum()), float(every.scored.sum())]
        )
        e = _renumbered(every, kept, sampling.n)
        metrics = _means(sums, sampled) | {
            "sampling/rounds": float(rounds),
            "sampling/prompts": float(sampled),
            "sampling/kept_prompts": float(len(kept)),
            "sampling/waste": 1 - len(kept) / max(sampled, 1),
            "sampling/scores": score / max(num_scored, 1.0),
        }
        return Collected(e, len(kept), metrics)

    def _with_variance(self, e: Experience, before: int, total: int, n: int) -> list[int]:
        """Collective. Numbers of this round's prompts whose clipped scores differ, or are not
        finite. Answers without a score do not count. ``before``: prompts of earlier rounds.
        """
        groups = e.numbers // n - before
        scores = torch.where(e.scores.isfinite(), clip_scores(e.scores, self.clip), e.scores)
        stats = group_stats(scores[e.scored], groups[e.scored], total)
        stats = dist.all_reduce_sum(stats)
        differ = group_has_variance(stats) | ~stats.isfinite().all(dim=0)
        return (before + differ.nonzero().flatten()).tolist()

    def _next_prompts(self, fallback: PromptTable, size: int) -> PromptTable:
        """Collective. This rank's share of the next ``size`` prompts, whose order does not depend
        on the number of ranks. ``fallback``: prompts to use once ``more_prompts`` is exhausted.
        """
        while len(self._queue.ids) < size:
            batch = None if self._more is None else next(self._more, None)
            prompts = fallback if batch is None else PromptTable.of(batch)
            for of_rank, is_exhausted in dist.gather_objects((prompts, batch is None)):
                self._queue = self._queue.concat(of_rank)
                if is_exhausted:  # on one rank, therefore on all
                    self._more = None
        rows = list(range(len(self._queue.ids)))
        taken, self._queue = self._queue.pick(rows[:size]), self._queue.pick(rows[size:])
        return taken.pick(dist.my_share(rows[:size]))


def _renumbered(e: Experience, kept: list[int], n: int) -> Experience:
    """The sequences of the prompts ``kept``, numbered as if the rollout had no others."""
    places = {number: place for place, number in enumerate(kept)}
    groups = (e.numbers // n).tolist()
    e = e.pick([row for row, group in enumerate(groups) if group in places])
    place = torch.tensor([places[g] for g in (e.numbers // n).tolist()], dtype=torch.int64)
    e.numbers = place * n + e.numbers % n
    # An experience is in the order of its numbers; a rank's rounds already are.
    assert bool((e.numbers[1:] > e.numbers[:-1]).all())
    return e


def _total_and_first(num_prompts: int) -> tuple[int, int]:
    """Collective. Number of prompts over all ranks, and on the ranks before this one."""
    counts = dist.gather_objects(num_prompts)
    return sum(counts), sum(counts[: dist.rank()])


def _accumulate(sums: dict[str, float], metrics: dict[str, float], weight: int) -> None:
    """Add up seconds and counts; weigh the rest by the prompts of the round."""
    for name, value in metrics.items():
        added = value if _adds_up(name) else value * weight
        sums[name] = sums.get(name, 0.0) + added


def _means(sums: dict[str, float], weight: int) -> dict[str, float]:
    return {n: v if _adds_up(n) else v / max(weight, 1) for n, v in sums.items()}


def _adds_up(name: str) -> bool:
    return name.startswith("time/") or name in ("rollout/unscored", "rollout/preemptions")
