"""Policy losses, how a step averages them, and the value loss, against float64 NumPy loops.

Written from the papers, action by action, with gradients by hand; whole sequences of GSPO against
float64 autograd of the paper's own form.
"""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from loss_rows import (
    SEEDS,
    answer_lens,
    as_np,
    assert_close,
    check_metrics,
    in_fp32,
    mask_of,
    with_garbage,
)

from dschat import losses

NUM_ROWS, WIDTH = 8, 6


def side(clipped, ratio):
    """-1 where an action is clipped below 1, 1 above, 0 where it is not."""
    return int(clipped) * (1 if ratio > 1 else -1)


def naive_ppo(new, old, advantages, low, high, dual_clip=None):
    """One row: values, gradients, clipped or not (arXiv 1707.06347, eq. 7; 1912.09729, eq. 5)."""
    out = []
    for t, advantage in enumerate(advantages):
        ratio = math.exp(new[t] - old[t])
        near = min(max(ratio, 1 - low), 1 + high)
        objective = min(ratio * advantage, near * advantage)
        clipped = objective < ratio * advantage
        if dual_clip is not None and advantage < 0 and dual_clip * advantage > objective:
            objective, clipped = dual_clip * advantage, True
        out.append((-objective, 0.0 if clipped else -ratio * advantage, side(clipped, ratio)))
    return out


def naive_dual(new, old, advantages, low, high):
    return naive_ppo(new, old, advantages, low, high, dual_clip=1.5)


def naive_gspo(new, old, advantages, low, high):
    """One row (arXiv 2507.18071, eq. 7, 13, 14): every action has the ratio of the sequence."""
    mean_log_ratio = math.fsum(n - o for n, o in zip(new, old, strict=True)) / max(1, len(new))
    ratio = math.exp(mean_log_ratio)
    near = min(max(ratio, 1 - low), 1 + high)
    out = []
    for advantage in advantages:
        clipped = near * advantage < ratio * advantage
        objective = near * advantage if clipped else ratio * advantage
        out.append((-objective, 0.0 if clipped else -ratio * advantage, side(clipped, ratio)))
    return out


def naive_cispo(new, old, advantages, low, high):
    """One row (arXiv 2506.13585, eq. 4-5): the clipped ratio is a constant beside log pi."""
    out = []
    for t, advantage in enumerate(advantages):
        ratio = math.exp(new[t] - old[t])
        near = min(max(ratio, 1 - low), 1 + high)
        out.append((-near * advantage * new[t], -near * advantage, side(near != ratio, ratio)))
    return out


def dual_loss(*args, **kwargs):
    return losses.policy_loss(*args, **kwargs, dual_clip=1.5)


# Name: ours, the loop, a range that clips some sequences or actions of `an_update` and not others.
KINDS: dict[str, tuple[Callable, Callable, tuple[float, float]]] = {
    "ppo": (losses.policy_loss, naive_ppo, (0.2, 0.28)),
    "dual": (dual_loss, naive_dual, (0.2, 0.28)),
    "gspo": (losses.gspo_loss, naive_gspo, (0.1, 0.15)),
    "cispo": (losses.cispo_loss, naive_cispo, (0.3, 0.2)),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def an_update(seed: int):
    """(new, old, advantages, weights), lengths, mask, rng: float64 that fp32 holds exactly."""
    rng = np.random.default_rng(seed)
    lens = answer_lens(rng, NUM_ROWS, WIDTH)
    shape = (NUM_ROWS, WIDTH)
    old = in_fp32(rng.normal(-2, 1, shape))
    # Sequences drift as a whole, so that GSPO's mean ratios leave their range too.
    new = in_fp32(old + rng.normal(0, 0.25, shape) + rng.normal(0, 0.25, (NUM_ROWS, 1)))
    advantages = in_fp32(rng.normal(0, 1, shape))
    weights = in_fp32(rng.uniform(0, 2, shape))
    return (new, old, advantages, weights), lens, mask_of(lens, WIDTH), rng


def naive_update(naive, arrays, lens, sides):
    """Loss, gradient and metrics of the whole update, row by row."""
    new, old, advantages, weights = arrays
    loss, grad = 0.0, np.zeros(new.shape)
    names = ("clipped", "clipped_low", "approxkl", "ratio", "ratio_abs_dev", "tokens")
    metrics = dict.fromkeys(names, 0.0)
    for b, n in enumerate(lens):
        for t, (value, slope, clipped) in enumerate(
            naive(new[b, :n], old[b, :n], advantages[b, :n], *sides)
        ):
            loss += weights[b, t] * value
            grad[b, t] = weights[b, t] * slope
            metrics["clipped"] += abs(clipped)
            metrics["clipped_low"] += clipped < 0
            difference = new[b, t] - old[b, t]
            metrics["approxkl"] += 0.5 * difference**2
            metrics["ratio"] += math.exp(difference)
            metrics["ratio_abs_dev"] += abs(math.exp(difference) - 1)
            metrics["tokens"] += 1
    return loss, grad, metrics


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("is_weighted", [True, False])
@every_kind
def test_loss_gradient_and_metrics(kind, is_weighted, seed):
    """Without weights actions count one; a single number clips both sides."""
    ours, naive, sides = KINDS[kind]
    arrays, lens, mask, rng = an_update(seed)
    if not is_weighted:
        arrays, sides = (*arrays[:3], np.ones(mask.shape)), (0.1, 0.1)
    loss, grad, metrics = naive_update(naive, arrays, lens, sides)
    assert 0 < metrics["clipped"] < metrics["tokens"]  # both branches are exercised

    new, old, advantages, weights = (with_garbage(x, mask, rng).requires_grad_() for x in arrays)
    given = (sides, {"weights": weights}) if is_weighted else (0.1, {})
    actual, actual_metrics = ours(new, old, advantages, mask, given[0], **given[1])
    assert actual.ndim == 0
    assert_close(actual, loss)
    check_metrics(actual_metrics, metrics)
    actual.backward()
    assert_close(new.grad, grad)
    for constant in (old, advantages, weights):
        assert constant.grad is None or (constant.grad == 0).all()


@every_kind
def test_of_the_same_policy_the_gradient_is_reinforce(kind):
    """On policy all ratios are 1: every loss has the gradient of -A log pi, and none is clipped."""
    ours, _, sides = KINDS[kind]
    mask = torch.tensor([[True, True], [True, False]])
    new = torch.tensor([[-1.0, -3.0], [-0.5, math.nan]], requires_grad=True)
    advantages = torch.tensor([[2.0, -0.5], [3.0, math.nan]])
    weights = torch.tensor([[0.5, 1.0], [2.0, math.nan]])
    loss, metrics = ours(new, new, advantages, mask, sides, weights=weights)
    loss.backward()
    assert_close(new.grad, [[-1.0, 0.5], [-6.0, 0.0]])
    expected = dict.fromkeys(("clipped", "clipped_low", "approxkl", "ratio_abs_dev"), 0.0)
    expected |= {"ratio": 3.0, "tokens": 3.0}
    check_metrics(metrics, expected)


@pytest.mark.parametrize("kind", [*KINDS, "value"])
@pytest.mark.parametrize("shape", [(0, 4), (3, 4), (3, 0)])
def test_without_actions_loss_and_gradient_are_zero(kind, shape):
    mask = torch.zeros(shape, dtype=torch.bool)
    junk = torch.full(shape, math.nan)
    new = junk.clone().requires_grad_()
    if kind == "value":
        loss, metrics = losses.value_loss(new, junk, junk, mask, 0.2)
    else:
        ours, _, sides = KINDS[kind]
        loss, metrics = ours(new, junk, junk, mask, sides, weights=junk)
    loss.backward()  # still connected: ranks without rows run their backward pass too
    assert loss.item() == 0.0
    assert (new.grad == 0).all()
    check_metrics(metrics, dict.fromkeys(metrics, 0.0))


@every_kind
def test_bf16_is_computed_in_fp32(kind):
    ours, naive, sides = KINDS[kind]
    new, old, advantage = [-1.0078125, -2.015625], [-1.0, -2.0], [1.0, 1.0]  # exact in bf16
    mask = torch.ones(1, 2, dtype=torch.bool)
    inputs = (torch.tensor([x]).bfloat16() for x in (new, old, advantage))
    expected = sum(value for value, _, _ in naive(new, old, advantage, *sides))
    assert_close(ours(*inputs, mask, sides)[0], expected)


# ---- by hand


@pytest.mark.parametrize(
    ("advantage", "ratio", "objective", "slope"),
    [  # range 0.2 below, 0.28 above (DAPO's); the objective, and its derivative by log pi
        (2.0, 1.27, 2.54, 2.54),
        (2.0, 1.29, 2.56, 0.0),
        (2.0, 0.1, 0.2, 0.2),  # a good action made rare is never clipped
        (-2.0, 0.81, -1.62, -1.62),
        (-2.0, 0.79, -1.6, 0.0),
        (-2.0, 2.9, -5.8, -5.8),
        (-2.0, 3.1, -6.0, 0.0),  # dual clip: never below 3 A
        (-2.0, 50.0, -6.0, 0.0),
        (2.0, 50.0, 2.56, 0.0),
        (0.0, 50.0, 0.0, 0.0),
    ],
)
def test_dual_clip_of_three_by_hand(advantage, ratio, objective, slope):
    new = torch.tensor([[math.log(ratio)]], requires_grad=True)
    mask = torch.ones(1, 1, dtype=torch.bool)
    loss, metrics = losses.policy_loss(
        new, torch.zeros(1, 1), torch.tensor([[advantage]]), mask, (0.2, 0.28), dual_clip=3.0
    )
    loss.backward()
    assert_close(loss, -objective)
    assert_close(new.grad, [[-slope]])
    assert metrics["clipped"].item() == float(advantage != 0 and slope == 0)
    without, _ = losses.policy_loss(
        new, torch.zeros(1, 1), torch.tensor([[advantage]]), mask, (0.2, 0.28)
    )
    assert_close(without, -min(objective, advantage * ratio if advantage < 0 else objective))


def test_gspo_of_the_paper_range_by_hand():
    """Sec. 5.1 there: 3e-4 below, 4e-4 above. Two actions with log-ratios of 1e-3 and -3e-4 have a
    sequence ratio of exp(3.5e-4), which is kept; 1e-3 and -1e-4 make exp(4.5e-4), clipped.
    """
    new = torch.tensor([[1e-3, -3e-4], [1e-3, -1e-4]], requires_grad=True)
    mask = torch.ones(2, 2, dtype=torch.bool)
    loss, metrics = losses.gspo_loss(
        new,
        torch.zeros(2, 2),
        torch.ones(2, 2),
        mask,
        (3e-4, 4e-4),
        weights=torch.full((2, 2), 0.5),
    )
    loss.backward()
    assert_close(loss, -math.exp(3.5e-4) - 1.0004, rtol=2e-7)
    assert_close(new.grad, [[-0.5 * math.exp(3.5e-4)] * 2, [0.0, 0.0]], rtol=2e-7)
    assert metrics["clipped"].item() == 2.0


def test_cispo_keeps_a_gradient_beyond_the_range():
    new = torch.tensor([[math.log(10.0), math.log(0.01), -0.5]], requires_grad=True)
    old = torch.tensor([[0.0, 0.0, -0.5]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    loss, metrics = losses.cispo_loss(new, old, torch.tensor([[1.0, -2.0, 3.0]]), mask, (1.0, 4.0))
    loss.backward()
    # Weights 5, 0.01 (nothing is clipped below with a range of 1), 1.
    assert_close(new.grad, [[-5.0, 0.02, -3.0]])
    assert_close(loss, -5 * math.log(10) + 0.02 * math.log(0.01) + 1.5)
    assert metrics["clipped"].item() == 1.0


def test_cispo_of_a_ratio_beyond_fp32_is_the_clipped_weight():
    new = torch.tensor([[100.0, -200.0]], requires_grad=True)
    mask = torch.ones(1, 2, dtype=torch.bool)
    loss, _ = losses.cispo_loss(new, torch.zeros(1, 2), torch.ones(1, 2), mask, (1.0, 4.0))
    loss.backward()
    assert_close(loss, -500.0)
    assert_close(new.grad, [[-5.0, 0.0]])


def test_gspo_ratio_is_exact_beside_actions_far_off():
    """Actions 10 nats off, their mean 1e-4: digits lost beside the 10 would count in 3e-4."""
    new, mask = torch.tensor([[10.0, -9.999782]]), torch.ones(1, 2, dtype=torch.bool)
    ratio = math.exp(math.fsum(as_np(new)[0]) / 2)
    for weights in ([[1.0, 0.0]], [[0.0, 1.0]]):
        loss, _ = losses.gspo_loss(
            new, torch.zeros(1, 2), torch.ones(1, 2), mask, 3e-4, weights=torch.tensor(weights)
        )
        assert_close(loss, -ratio, rtol=1.2e-7, atol=0)


# ---- how a step averages


def test_aggregation_by_hand():
    mask = mask_of([2, 0, 1, 4], 4)
    ones = mask.numpy().astype(float)
    expected = {
        "token": (ones, 7),
        "sequence": ([[0.5, 0.5, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0], [0.25] * 4], 3),
        "constant": (ones / 10, 3),
    }
    for how, (weights, count) in expected.items():
        assert_close(losses.aggregation_weights(mask, how, 10), weights)
        actual = losses.aggregation_count(mask, how)
        assert actual.ndim == 0
        assert actual.item() == count


# ---- the value loss


@pytest.mark.parametrize("seed", SEEDS)
def test_value_loss(seed):
    rng = np.random.default_rng(seed)
    eps = 0.2
    lens = answer_lens(rng, NUM_ROWS, WIDTH)
    mask = mask_of(lens, WIDTH)
    old = rng.normal(0, 1, mask.shape).astype(np.float32)
    new = (old + rng.normal(0, 0.3, mask.shape)).astype(np.float32)
    returns = rng.normal(0, 1, mask.shape).astype(np.float32)

    def one(v: float, v_old: float, target: float) -> float:
        near = min(max(v, v_old - eps), v_old + eps)
        return 0.5 * max((v - target) ** 2, (near - target) ** 2)

    loss, grad, metrics = 0.0, np.zeros(old.shape), {"value_clipped": 0.0, "tokens": 0.0}
    for b, n in enumerate(lens):
        for t in range(n):
            v, v_old, target = float(new[b, t]), float(old[b, t]), float(returns[b, t])
            loss += one(v, v_old, target)
            h = 1e-7  # no seed puts a kink of the max within h
            grad[b, t] = (one(v + h, v_old, target) - one(v - h, v_old, target)) / (2 * h)
            metrics["value_clipped"] += one(v, v_old, target) > 0.5 * (v - target) ** 2
            metrics["tokens"] += 1
    assert 0 < metrics["value_clipped"] < metrics["tokens"]

    values = with_garbage(new, mask, rng).requires_grad_()
    actual, actual_metrics = losses.value_loss(
        values, with_garbage(old, mask, rng), with_garbage(returns, mask, rng), mask, eps
    )
    assert_close(actual, loss)
    actual.backward()
    assert_close(values.grad, grad, atol=1e-5)
    check_metrics(actual_metrics, metrics)
