"""Samples prompts until enough of them have answers of different scores.

Dynamic sampling of DAPO (arXiv 2503.14476, section 3.2).
"""

import logging
import math

import torch

import dschat.distributed as dist
from dschat.inference.protocol import SamplingParams
from dschat.losses import clip_scores, group_has_variance, group_stats
from dschat.rlhf.experience import Experience, joined
from dschat.rlhf.prompt_queue import PromptQueue
from dschat.rlhf.prompt_table import PromptTable
from dschat.rlhf.rollout_collector import PendingRollout, RolloutCollector, RolloutSource

logger = logging.getLogger("dschat")


class DynamicSampler(RolloutSource):
    """Fills rollouts with prompts of ``more``."""

    def __init__(self, collector: RolloutCollector, max_rounds: int, more: PromptQueue) -> None:
        self._collector, self._max_rounds, self._more = collector, max_rounds, more

    def generate(self, prompts: PromptTable, sampling: SamplingParams) -> PendingRollout:
        """Collective. Sample in rounds until enough prompts have answers of different scores; the
        result is scored already.

        The first such prompts in the order of the rounds are
        kept, whichever rank has them. Later rounds sample as many prompts as are likely missing.
        """
        first_prompts, wanted = prompts, sum(dist.gather_objects(len(prompts.ids)))
        kept: list[int] = []  # numbers of prompts, over all ranks
        parts: list[Experience] = []
        sums: dict[str, float] = {}
        sampled = rounds = 0
        while rounds < self._max_rounds and len(kept) < wanted:
            if rounds:
                likely = math.ceil((wanted - len(kept)) * sampled / max(len(kept), 1))
                prompts = self._more.take(min(wanted, likely), first_prompts)
            rollout = self._collector.generate(prompts, sampling, sampled)
            total = rollout.num_prompts
            parts.append(rollout.score())
            kept += self._with_variance(parts[-1], sampled, total, sampling.n)
            _accumulate(sums, rollout.metrics, weight=total)
            sampled, rounds = sampled + total, rounds + 1
        kept = kept[:wanted]
        if not kept:
            logger.warning(
                "none of %d sampled prompts (%d rounds) has answers of different scores: this "
                "iteration trains nothing",
                sampled,
                rounds,
            )
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
        return PendingRollout(e, len(kept), metrics)

    def _with_variance(self, e: Experience, before: int, total: int, n: int) -> list[int]:
        """Collective. Numbers of this round's prompts whose clipped scores differ, or are not
        finite. Answers without a score do not count. ``before``: prompts of earlier rounds.
        """
        groups = e.numbers // n - before
        scores = torch.where(
            e.scores.isfinite(), clip_scores(e.scores, self._collector.scorer.clip), e.scores
        )
        stats = group_stats(scores[e.scored], groups[e.scored], total)
        stats = dist.all_reduce_sum(stats)
        differ = group_has_variance(stats) | ~stats.isfinite().all(dim=0)
        return (before + differ.nonzero().flatten()).tolist()


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


def _accumulate(sums: dict[str, float], metrics: dict[str, float], weight: int) -> None:
    """Add up seconds and counts; weigh the rest by the prompts of the round."""
    for name, value in metrics.items():
        added = value if _adds_up(name) else value * weight
        sums[name] = sums.get(name, 0.0) + added


def _means(sums: dict[str, float], weight: int) -> dict[str, float]:
    return {n: v if _adds_up(n) else v / max(weight, 1) for n, v in sums.items()}


def _adds_up(name: str) -> bool:
    return name.startswith("time/") or name in ("rollout/unscored", "throughput/preemptions")
