"""Combines the scores of all sources, reward model included, into one weighted sum per sample."""

import math
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

import dschat.distributed as dist
from dschat.config.reward import RewardTrainingConfig
from dschat.rewards.scoring import SourceScores


def combine(
    sources: list[SourceScores], config: RewardTrainingConfig, scale: "RunningScale | None"
) -> tuple[Tensor, list[list[float]] | None]:
    """Collective where ``normalize_reward``. The weighted sum of the sources' scores.

    ``normalize_reward`` normalizes each source with running statistics that include these samples;
    ``scale`` None turns it off. A source adds 0 where it returned None. A source of weight 0 adds
    nothing, not even NaN.

    Returns:
        scores (S,) fp32, NaN where a weighted source failed; and the weighted sum of token scores,
        (S,) of (A,), if a weighted source gave any. The scores include the token scores: the
        difference belongs to the answer as a whole.
    """
    if not config.normalize_reward:
        scale = None
    if scale is not None:
        scale.update({source.name: source.scores[_scored(source)] for source in sources})
    total = torch.zeros(len(sources[0].scores), dtype=torch.float64)
    by_token: list[list[float]] | None = None
    for source in sources:
        if not source.weight:
            continue
        mean, std = (0.0, 1.0) if scale is None else scale.mean_and_std(source.name)
        normal = (source.scores.double() - mean) / std
        if source.applies is not None:
            normal = torch.where(source.applies, normal, 0.0)
        total += source.weight * normal
        if source.token_scores is not None:
            factor = source.weight / std
            by_token = _added(by_token or [[] for _ in total], source.token_scores, factor)
    return total.float(), by_token


def any_applies(sources: list[SourceScores]) -> Tensor:
    """Samples that at least one weighted source scored (returned other than None): (S,) bool.

    All True if no source has a weight: then training does not use the scores.
    """
    weighted = [source for source in sources if source.weight]
    applies = torch.full((len(sources[0].scores),), not weighted)
    for source in weighted:
        applies |= True if source.applies is None else source.applies
    return applies


def source_means(
    prefix: str, sources: list[SourceScores], with_std: bool = False
) -> dict[str, float]:
    """Collective. Mean raw score of each source over the samples it scored, ``prefix/NAME``;
    ``with_std`` also the standard deviation, ``prefix/NAME_std``.

    Samples where it failed or returned None do not count.
    """
    sums = []
    for source in sources:
        scores = source.scores[_scored(source)].double()
        sums += [float(len(scores)), float(scores.sum()), float(scores.square().sum())]
    totals = iter(dist.sum_floats(sums))
    metrics = {}
    for source, number, total, squares in zip(sources, totals, totals, totals, strict=True):
        mean = total / max(number, 1.0)
        metrics[f"{prefix}/{source.name}"] = mean
        if with_std:
            variance = squares / max(number, 1.0) - mean**2
            metrics[f"{prefix}/{source.name}_std"] = math.sqrt(max(variance, 0.0))
    return metrics


def _scored(source: SourceScores) -> Tensor:
    """Samples with a score: (S,) bool."""
    finite = torch.isfinite(source.scores)
    return finite if source.applies is None else finite & source.applies


def _added(sums: list[list[float]], rows: list[list[float]], factor: float) -> list[list[float]]:
    """``sums`` + ``factor`` x ``rows``; the shorter of two rows is padded with 0."""
    return [
        [a + factor * b for a, b in zip_longest(total, row, fillvalue=0.0)]
        for total, row in zip(sums, rows, strict=True)
    ]


class RunningScale:
    """Running mean and standard deviation of each source's scores over all ranks.

    Counts, means and sums of squared deviations, in float64, are merged by Chan, Golub and LeVeque
    (1979), "Updating formulae and a pairwise algorithm for computing sample variances", eq. 2.1.
    """

    def __init__(self) -> None:
        self._moments: dict[str, tuple[float, float, float]] = {}  # name -> count, mean, M2

    def update(self, scores: dict[str, Tensor]) -> None:
        """Collective. Add ``scores`` (n,) of each source; n may be 0 and differ across ranks."""
        local = {name: _moments_of(values) for name, values in scores.items()}
        for rank_moments in dist.gather_objects(local):
            for name, moments in rank_moments.items():
                self._moments[name] = _merged(self._moments.get(name, (0.0, 0.0, 0.0)), moments)

    def mean_and_std(self, name: str) -> tuple[float, float]:
        """Population mean and standard deviation so far; 1 if all scores were equal."""
        count, mean, m2 = self._moments.get(name, (0.0, 0.0, 0.0))
        std = math.sqrt(m2 / count) if count else 0.0
        # Scores are fp32: rounding leaves a tiny deviation among equal ones.
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
    """Count, mean and sum of squared deviations of the union of two sets."""
    count = a[0] + b[0]
    if not count:
        return a
    difference = b[1] - a[1]
    mean = a[1] + difference * b[0] / count
    return count, mean, a[2] + b[2] + difference**2 * a[0] * b[0] / count
