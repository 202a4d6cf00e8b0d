"""Confidence intervals of means over rows, and of differences between models on the same rows.

Shares of right answers get Wilson's score interval (Wilson 1927, JASA 22, 209-212). Other means,
and all differences, get the percentile bootstrap over rows (Efron and Tibshirani 1993, An
Introduction to the Bootstrap, chapter 13). A difference is paired: both models are resampled with
the same rows (Koehn 2004, W04-3250).
"""

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np

_DRAWS = 2**22  # row numbers drawn at a time

Kind = Literal["share", "mean", "perplexity"]


@dataclass(frozen=True)
class Interval:
    """An estimate with the bounds of its confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Values:
    """A metric's values on R rows.

    The metric is sum(values) / sum(weights); of kind perplexity, e to the power of it. ``share``:
    every value is 0 or 1, and every weight is 1.
    """

    kind: Kind
    values: np.ndarray  # (R,) float64
    weights: np.ndarray  # (R,) float64

    @classmethod
    def of(cls, kind: Kind, values: list[float], weights: list[float] | None = None) -> "Values":
        array = np.asarray(values, dtype=np.float64)
        given = np.ones_like(array) if weights is None else np.asarray(weights, dtype=np.float64)
        return cls(kind, array, given)

    @property
    def estimate(self) -> float:
        return float(self._metric(self.values.sum(), self.weights.sum()))

    def interval(self, confidence: float, num_resamples: int, seed: int) -> Interval:
        """The estimate, with Wilson's interval of a share or else the bootstrap's."""
        if self.kind == "share":
            return wilson(int(self.values.sum()), len(self.values), confidence)
        low, high = _bounds(self.resampled(num_resamples, seed), confidence)
        return Interval(self.estimate, low, high)

    def resampled(self, num_resamples: int, seed: int) -> np.ndarray:
        """The metric on rows drawn with replacement: (num_resamples,).

        The rows depend on R, ``num_resamples`` and ``seed`` alone.
        """
        rng, num_rows, parts = np.random.default_rng(seed), len(self.values), []
        size = max(1, _DRAWS // num_rows)
        for start in range(0, num_resamples, size):
            rows = rng.integers(num_rows, size=(min(size, num_resamples - start), num_rows))
            parts.append(self._metric(self.values[rows].sum(1), self.weights[rows].sum(1)))
        return np.concatenate(parts)

    def _metric(self, total: np.ndarray, weight: np.ndarray) -> np.ndarray:
        mean = total / weight
        return np.exp(mean) if self.kind == "perplexity" else mean


@dataclass(frozen=True)
class Difference(Interval):
    """A difference of two metrics. ``p``: two-sided, of no difference."""

    p: float


def wilson(num_right: int, total: int, confidence: float) -> Interval:
    """The share of ``num_right`` in ``total``, with Wilson's score interval."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share = num_right / total
    middle = share + z * z / (2 * total)
    spread = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    low, high = (middle - spread) / scale, (middle + spread) / scale
    # Without rounding: none right begins at 0, all right ends at 1.
    return Interval(share, low if num_right else 0.0, high if num_right < total else 1.0)


def paired_difference(
    one: Values, baseline: Values, confidence: float, num_resamples: int, seed: int
) -> Difference:
    """``one`` - ``baseline`` on the same rows, by the paired bootstrap.

    ``p`` is twice the share of resamples on the other side of 0, with ties on both sides, and at
    least 1 / num_resamples.
    """
    differences = one.resampled(num_resamples, seed) - baseline.resampled(num_resamples, seed)
    low, high = _bounds(differences, confidence)
    tail = min(float((differences <= 0).mean()), float((differences >= 0).mean()))
    p = min(1.0, max(2 * tail, 1 / num_resamples))
    return Difference(one.estimate - baseline.estimate, low, high, p)


def _bounds(samples: np.ndarray, confidence: float) -> tuple[float, float]:
    low, high = np.quantile(samples, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)
