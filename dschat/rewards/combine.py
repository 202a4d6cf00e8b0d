"""A reward is a weighted sum of sources, the reward model among them.

The scores of each source come in; one score a sample, and each source's mean, go out. It must not
know how a source scores, nor what is learned from the sum.
"""

import math
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

import dschat.distributed as dist
from dschat.config.reward import RewardSourcesConfig
from dschat.rewards.reward_functions import SourceScores


def combine(
    sources: list[SourceScores], config: RewardSourcesConfig, scale: "RunningScale | None"
) -> tuple[Tensor, list[list[float]] | None]:
    """Collective where ``normalize_reward``. The weighted sum of the sources' scores.

    Each source is normalised first, if at all, with statistics that count these samples too; where
    one said None it adds 0. One of weight 0 adds nothing, NaN neither. ``scale`` None: as they are.

    Returns:
        scores (S,) fp32, NaN where a source with a weight has none; and, where such a source gave
        scores by token, the weighted sum of those (S,) of (A,). The first counts them too: what
        belongs to the answer as a whole is the difference.
    """
    scales = {source.name: (0.0, 1.0) for source in sources}
    if config.normalize_reward and scale is not None:
        scale.update({source.name: _that_apply(source) for source in sources})
        scales = {source.name: scale.mean_and_std(source.name) for source in sources}
    total = torch.zeros(len(sources[0].scores), dtype=torch.float64)
    by_token: list[list[float]] | None = None
    for source in sources:
        if not source.weight:
            continue
        mean, std = scales[source.name]
        normal = (source.scores.double() - mean) / std
        if source.applies is not None:
            normal = torch.where(source.applies, normal, 0.0)
        total += source.weight * normal
        if source.token_scores is not None:
            factor = source.weight / std
            by_token = _added(by_token or [[] for _ in total], source.token_scores, factor)
    return total.float(), by_token


def any_applies(sources: list[SourceScores]) -> Tensor:
    """Samples of which any source with a weight said something other than None: (S,) bool. All,
    where none has a weight: then scores are not what is learned from.
    """
    weighted = [source for source in sources if source.weight]
    applies = torch.full((len(sources[0].scores),), not weighted)
    for source in weighted:
        applies |= True if source.applies is None else source.applies
    return applies


def joined_scores(parts: list[list[SourceScores]]) -> list[SourceScores]:
    """The same sources over one generation batch after the other."""
    together = []
    for same in zip(*parts, strict=True):
        by_token = None
        if any(source.token_scores is not None for source in same):
            by_token = [
                row
                for source in same
                for row in (source.token_scores or [[] for _ in source.scores])
            ]
        joined_fields = {"token_scores": by_token, "applies": None}
        for name in ("scores", "applies"):
            if getattr(same[0], name) is not None:
                joined_fields[name] = torch.cat([getattr(source, name) for source in same])
        together.append(replace(same[0], **joined_fields))
    return together


def source_means(prefix: str, sources: list[SourceScores]) -> dict[str, float]:
    """Collective. Mean score of each source, of the samples that it scored (those it said None of
    are none), as it gave them: ``prefix/NAME``.
    """
    sums = []
    for source in sources:
        scored = torch.isfinite(source.scores)
        if source.applies is not None:
            scored &= source.applies
        sums += [float(source.scores[scored].double().sum()), float(scored.sum())]
    totals = dist.sum_floats(sums)
    return {
        f"{prefix}/{source.name}": total / max(number, 1.0)
        for source, total, number in zip(sources, totals[::2], totals[1::2], strict=True)
    }


def _that_apply(source: SourceScores) -> Tensor:
    scores = source.scores
    known = torch.isfinite(scores)
    return scores[known if source.applies is None else known & source.applies]


def _added(sums: list[list[float]], rows: list[list[float]], factor: float) -> list[list[float]]:
    """``sums`` + ``factor`` x ``rows``; a row may be shorter than the other."""
    return [
        [a + factor * b for a, b in zip_longest(ours, theirs, fillvalue=0.0)]
        for ours, theirs in zip(sums, rows, strict=True)
    ]


class RunningScale:
    """Mean and standard deviation of every source's scores so far, over all ranks.

    Counts, means and sums of squared deviations, in float64, are merged by Chan, Golub and LeVeque
    (1979), "Updating formulae and a pairwise algorithm for computing sample variances", eq. 2.1.
    """

    def __init__(self) -> None:
        self._moments: dict[str, tuple[float, float, float]] = {}  # name -> count, mean, M2

    def update(self, scores: dict[str, Tensor]) -> None:
        """Collective. Count ``scores`` (n,) of each source; n may be 0 and differ among ranks."""
        mine = {name: _moments_of(values) for name, values in scores.items()}
        for theirs in dist.gather_objects(mine):
            for name, moments in theirs.items():
                self._moments[name] = _merged(self._moments.get(name, (0.0, 0.0, 0.0)), moments)

    def mean_and_std(self, name: str) -> tuple[float, float]:
        """Of the population seen so far; a source that never varied has 1 for its deviation."""
        count, mean, m2 = self._moments.get(name, (0.0, 0.0, 0.0))
        std = math.sqrt(m2 / count) if count else 0.0
        # Scores are fp32: what is left of equal ones by rounding is no deviation.
        return mean, std if std > 1e-7 * max(1.0, abs(mean)) else 1.0

    def state_dict(self) -> dict[str, list[float]]:
        """Name -> count, mean and sum of squared deviations."""
        return {name: list(moments) for name, moments in self._moments.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._moments = {name: (float(n), float(m), float(s)) for name, (n, m, s) in state.items()}


def _moments_of(values: Tensor) -> tuple[float, float, float]:
    if not len(values):
        return 0.0, 0.0, 0.0
    values = values.double()
    mean = values.mean()
    return float(len(values)), float(mean), float((values - mean).square().sum())


def _merged(
    a: tuple[float, float, float], b: tuple[float, float, float]
) -> tuple[float, float, float]:
    """Count, mean and squared deviations of two sets together."""
    count = a[0] + b[0]
    if not count:
        return a
    difference = b[1] - a[1]
    mean = a[1] + difference * b[0] / count
    return count, mean, a[2] + b[2] + difference**2 * a[0] * b[0] / count
