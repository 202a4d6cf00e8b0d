"""Intervals and paired differences, against published values and complete enumerations."""

import itertools
import math

import numpy as np
import pytest

from dschat.offline.statistics import Values, paired_difference, wilson


@pytest.mark.parametrize(
    ("right", "total", "low", "high"),
    [  # Newcombe 1998, Statistics in Medicine 17, 857-872, table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson(right, total, low, high):
    interval = wilson(right, total, 0.95)
    assert interval.value == right / total
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=5e-5)


def test_wilson_of_all_right_ends_at_one():
    assert wilson(7, 7, 0.9).high == 1.0


def every_resample(metric, num_rows: int) -> np.ndarray:
    """The metric of all equally likely resamples, sorted."""
    rows = itertools.product(range(num_rows), repeat=num_rows)
    return np.sort([metric(np.array(choice)) for choice in rows])


def quantiles(samples: np.ndarray, confidence: float) -> list[float]:
    """The smallest value with this share of the samples at or below it."""
    shares = ((1 - confidence) / 2, (1 + confidence) / 2)
    return [samples[math.ceil(share * len(samples)) - 1] for share in shares]


def test_bootstrap_of_a_perplexity():
    losses, tokens = np.array([1.0, 4.0, 0.5, 7.0, 2.5]), np.array([2.0, 3.0, 1.0, 4.0, 5.0])
    exact = every_resample(lambda i: math.exp(losses[i].sum() / tokens[i].sum()), 5)
    interval = Values.of("perplexity", list(losses), list(tokens)).interval(0.8, 200_000, 0)
    assert interval.value == pytest.approx(math.e)  # 15 nats in 15 tokens
    assert (interval.low, interval.high) == pytest.approx(quantiles(exact, 0.8), rel=2e-2)


def test_a_difference_is_paired():
    """Both models are resampled with the same rows: else the interval would be wider."""
    one, other = np.array([0.1, 0.8, 0.3, 0.95, 0.4]), np.array([0.0, 0.9, 0.1, 0.7, 0.35])
    exact = every_resample(lambda i: (one[i] - other[i]).mean(), 5)
    parts = Values.of("mean", list(one)), Values.of("mean", list(other))
    difference = paired_difference(*parts, 0.9, 200_000, 0)
    assert difference.value == pytest.approx(0.1)
    assert (difference.low, difference.high) == pytest.approx(quantiles(exact, 0.9), abs=5e-3)
    assert difference.p == pytest.approx(2 * (exact <= 1e-12).mean(), rel=0.1)


def test_equal_models_do_not_differ():
    values = Values.of("share", [0.0, 1.0, 1.0])
    difference = paired_difference(values, values, 0.95, 500, 1)
    assert (difference.value, difference.low, difference.high, difference.p) == (0, 0, 0, 1)


def test_resamples_do_not_depend_on_the_draws_at_a_time(monkeypatch):
    values = Values.of("mean", list(np.random.default_rng(0).normal(size=50)))
    before = values.resampled(200, 3)
    monkeypatch.setattr("dschat.offline.statistics._DRAWS", 50 * 7)
    assert np.array_equal(values.resampled(200, 3), before)
