"""Weights of what the rollout computed otherwise than training, against float64 NumPy loops."""

import math

import numpy as np
import pytest
import torch
from loss_rows import (
    SEEDS,
    answer_lens,
    assert_close,
    check_metrics,
    in_fp32,
    mask_of,
    with_garbage,
)

from dschat import losses

NUM_ROWS, WIDTH = 8, 6


def naive_rollout_weight(ratio: float, how: str, low: float, high: float) -> float:
    """tis: min(ratio, high); icepop: the ratio within [low, high], else 0 (arXiv 2510.18855)."""
    if how == "off":
        return 1.0
    if how == "tis":
        return min(ratio, high)
    return ratio if low <= ratio <= high else 0.0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("how", ["off", "tis", "icepop"])
@pytest.mark.parametrize(("low", "high"), [(0.5, 2.0), (0.9, 1.1), (0.0, 5.0)])
def test_rollout_weights(how, low, high, seed):
    rng = np.random.default_rng(seed)
    lens = answer_lens(rng, NUM_ROWS, WIDTH)
    mask = mask_of(lens, WIDTH)
    train = in_fp32(rng.normal(-2, 1, mask.shape))
    rollout = in_fp32(train + rng.normal(0, 1, mask.shape))
    expected, cut = np.zeros(mask.shape), 0
    for b, n in enumerate(lens):
        for t in range(n):
            ratio = math.exp(train[b, t] - rollout[b, t])
            expected[b, t] = naive_rollout_weight(ratio, how, low, high)
            cut += how != "off" and expected[b, t] != ratio
    weights, metrics = losses.rollout_weights(
        with_garbage(train, mask, rng).requires_grad_(),
        with_garbage(rollout, mask, rng).requires_grad_(),
        mask,
        how,
        low,
        high,
    )
    assert not weights.requires_grad
    assert_close(weights, expected)
    check_metrics(metrics, {"is_weight": expected.sum(), "is_cut": cut})


def test_rollout_weights_of_the_paper_by_hand():
    """IcePop's 0.5 and 5; TIS truncated at 2. Both where probabilities are e^200 apart."""
    log_ratios = torch.tensor([[math.log(x) for x in (0.49, 0.51, 1.0, 1.99, 2.01, 4.99, 5.01)]])
    extreme = torch.tensor([[200.0, -200.0]])
    train, mask = torch.cat([log_ratios, extreme], dim=1), torch.ones(1, 9, dtype=torch.bool)
    rollout = torch.zeros(1, 9)
    weights, metrics = losses.rollout_weights(train, rollout, mask, "icepop", 0.5, 5.0)
    assert_close(weights, [[0.0, 0.51, 1.0, 1.99, 2.01, 4.99, 0.0, 0.0, 0.0]])
    check_metrics(metrics, {"is_weight": 10.5, "is_cut": 4.0})
    weights, metrics = losses.rollout_weights(train, rollout, mask, "tis", 0.0, 2.0)
    assert_close(weights, [[0.49, 0.51, 1.0, 1.99, 2.0, 2.0, 2.0, 2.0, 0.0]])
    check_metrics(metrics, {"is_weight": 11.99, "is_cut": 4.0})


@pytest.mark.parametrize("how", ["off", "tis", "icepop"])
def test_equal_probabilities_have_weight_one(how):
    """The ends of icepop's range belong to it."""
    logprobs = torch.tensor([[-0.3, -7.1, math.nan]])
    mask = torch.tensor([[True, True, False]])
    weights, metrics = losses.rollout_weights(logprobs, logprobs, mask, how, 1.0, 1.0)
    assert weights.tolist() == [[1.0, 1.0, 0.0]]
    check_metrics(metrics, {"is_weight": 2.0, "is_cut": 0.0})
