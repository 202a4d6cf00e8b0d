"""Policy losses, how a step averages them, the value loss, and weights against the rollout, by
hand and by `float64_step`, which is written from the papers, sequence by sequence.
"""

import math
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from float64_step import token_losses, value_losses, weigh
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
from dschat.config.methods import CORRECTIONS

NUM_ROWS, WIDTH = 8, 6
SUMS = ("clipped", "approxkl", "ratio", "ratio_abs_dev", "tokens")


def dual_loss(*args, **kwargs):
    return losses.ppo_loss(*args, **kwargs, dual_clip=1.5)


# Name: ours, options of `float64_step`, a range that clips some sequences or actions of `an_update`
# and not others.
KINDS: dict[str, tuple[Callable, dict, tuple[float, float]]] = {
    "ppo": (losses.ppo_loss, {"policy_loss": "ppo"}, (0.2, 0.28)),
    "dual": (dual_loss, {"policy_loss": "ppo", "dual_clip": 1.5}, (0.2, 0.28)),
    "gspo": (losses.gspo_loss, {"policy_loss": "gspo"}, (0.1, 0.15)),
    "cispo": (losses.cispo_loss, {"policy_loss": "cispo"}, (0.3, 0.2)),
    "sapo": (losses.sapo_loss, {"policy_loss": "sapo"}, (1.05, 1.0)),
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


def in_float64(kind, sides, arrays, lens):
    """Loss, gradient and metrics of the whole update; ``clipped_low`` is left out."""
    args = SimpleNamespace(**{"dual_clip": None, "cliprange_sides": sides} | KINDS[kind][1])
    new, old, advantages, weights = map(torch.tensor, arrays)
    loss, metrics = torch.zeros((), dtype=torch.float64), dict.fromkeys(SUMS, 0.0)
    new.requires_grad_()
    for b, n in enumerate(lens):
        if n == 0:
            continue
        answer = SimpleNamespace(new=new[b, :n], old=old[b, :n], advantages=advantages[b, :n])
        values, num_clipped = token_losses(answer, args)
        loss = loss + (values * weights[b, :n]).sum()
        difference = (answer.new - answer.old).detach()
        parts = (num_clipped, difference**2 / 2, difference.exp(), (difference.exp() - 1).abs(), n)
        for name, part in zip(SUMS, parts, strict=True):
            metrics[name] += float(part.sum()) if torch.is_tensor(part) else part
    loss.backward()
    return loss.item(), as_np(new.grad), metrics


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("is_weighted", [True, False])
@every_kind
def test_loss_gradient_and_metrics(kind, is_weighted, seed):
    """Without weights actions count one; a single number clips both sides."""
    ours, _, sides = KINDS[kind]
    arrays, lens, mask, rng = an_update(seed)
    if not is_weighted:
        arrays, sides = (*arrays[:3], np.ones(mask.shape)), (0.1, 0.1)
    loss, grad, metrics = in_float64(kind, sides, arrays, lens)
    # Both branches are exercised; SAPO has no clip.
    assert 0 < metrics["clipped"] < metrics["tokens"] or kind == "sapo"

    new, old, advantages, weights = (with_garbage(x, mask, rng).requires_grad_() for x in arrays)
    given = (sides, {"weights": weights}) if is_weighted else (0.1, {})
    actual, actual_metrics = ours(new, old, advantages, mask, given[0], **given[1])
    assert actual.ndim == 0
    assert_close(actual, loss)
    low = actual_metrics.pop("clipped_low")  # see the tests by hand
    assert 0 <= low <= metrics["clipped"]
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
    ours, _, sides = KINDS[kind]
    exact = ([-1.0078125, -2.015625], [-1.0, -2.0], [1.0, 1.0])  # new, old, advantages; in bf16
    mask = torch.ones(1, 2, dtype=torch.bool)
    inputs = (torch.tensor([x]).bfloat16() for x in exact)
    expected, *_ = in_float64(kind, sides, np.array([[x] for x in (*exact, [1.0, 1.0])]), [2])
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
    loss, metrics = losses.ppo_loss(
        new, torch.zeros(1, 1), torch.tensor([[advantage]]), mask, (0.2, 0.28), dual_clip=3.0
    )
    loss.backward()
    assert_close(loss, -objective)
    assert_close(new.grad, [[-slope]])
    clipped = float(advantage != 0 and slope == 0)
    assert metrics["clipped"].item() == clipped
    assert metrics["clipped_low"].item() == clipped * (ratio < 1)
    without, _ = losses.ppo_loss(
        new, torch.zeros(1, 1), torch.tensor([[advantage]]), mask, (0.2, 0.28)
    )
    assert_close(without, -min(objective, advantage * ratio if advantage < 0 else objective))


def test_gspo_of_the_paper_range_by_hand():
    """Sec. 5.1 there: 3e-4 below, 4e-4 above. Two actions with log-ratios of 1e-3 and -3e-4 have a
    sequence ratio of exp(3.5e-4), which is kept; 1e-3 and -1e-4 make exp(4.5e-4), clipped.
    """
    new = torch.tensor([[1e-3, -3e-4], [1e-3, -1e-4]], requires_grad=True)
    old, ones = torch.zeros(2, 2), torch.ones(2, 2)
    sides, weights = (3e-4, 4e-4), torch.full((2, 2), 0.5)
    loss, metrics = losses.gspo_loss(new, old, ones, ones.bool(), sides, weights=weights)
    loss.backward()
    assert_close(loss, -math.exp(3.5e-4) - 1.0004, rtol=2e-7)
    assert_close(new.grad, [[-0.5 * math.exp(3.5e-4)] * 2, [0.0, 0.0]], rtol=2e-7)
    assert (metrics["clipped"].item(), metrics["clipped_low"].item()) == (2.0, 0.0)
    # All actions of a sequence are below the range, also those that became likelier.
    _, metrics = losses.gspo_loss(-new, old, -ones, ones.bool(), sides)
    assert (metrics["clipped"].item(), metrics["clipped_low"].item()) == (4.0, 4.0)


def test_cispo_keeps_a_gradient_beyond_the_range():
    new = torch.tensor([[math.log(10.0), math.log(0.01), -0.5]], requires_grad=True)
    old = torch.tensor([[0.0, 0.0, -0.5]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    loss, metrics = losses.cispo_loss(new, old, torch.tensor([[1.0, -2.0, 3.0]]), mask, (1.0, 4.0))
    loss.backward()
    # Weights 5, 0.01 (nothing is clipped below with a range of 1), 1.
    assert_close(new.grad, [[-5.0, 0.02, -3.0]])
    assert_close(loss, -5 * math.log(10) + 0.02 * math.log(0.01) + 1.5)
    assert (metrics["clipped"].item(), metrics["clipped_low"].item()) == (1.0, 0.0)
    _, metrics = losses.cispo_loss(new, old, torch.ones(1, 3), mask, (0.5, 4.0))
    assert (metrics["clipped"].item(), metrics["clipped_low"].item()) == (2.0, 1.0)


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

    exact = torch.tensor(new, dtype=torch.float64, requires_grad=True)
    loss, metrics = 0.0, {"value_clipped": 0.0, "tokens": float(sum(lens))}
    for b, n in enumerate(lens):
        known = {"values": torch.tensor(old[b, :n]), "returns": torch.tensor(returns[b, :n])}
        of_tokens, num_clipped = value_losses(SimpleNamespace(**known), exact[b, :n], eps)
        loss = loss + of_tokens.sum()
        metrics["value_clipped"] += num_clipped
    loss.backward()
    assert 0 < metrics["value_clipped"] < metrics["tokens"]

    values = with_garbage(new, mask, rng).requires_grad_()
    actual, actual_metrics = losses.value_loss(
        values, with_garbage(old, mask, rng), with_garbage(returns, mask, rng), mask, eps
    )
    assert_close(actual, loss.item())
    actual.backward()
    assert_close(values.grad, as_np(exact.grad))
    check_metrics(actual_metrics, metrics)


# ---- weights of what the rollout computed otherwise than training


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("how", ["off", *CORRECTIONS])
@pytest.mark.parametrize(("low", "high"), [(0.5, 2.0), (0.9, 1.1), (0.0, 5.0)])
def test_rollout_weights(how, low, high, seed):
    rng = np.random.default_rng(seed)
    lens = answer_lens(rng, NUM_ROWS, WIDTH)
    mask = mask_of(lens, WIDTH)
    train = in_fp32(rng.normal(-2, 1, mask.shape))
    rollout = in_fp32(train + rng.normal(0, 1, mask.shape))
    expected, cut, dropped = np.zeros(mask.shape), 0, 0
    args = SimpleNamespace(rollout_is=how, importance_range=(low, high))
    for b, n in enumerate(lens):
        if not n:
            continue
        answer = {"old": torch.tensor(train[b, :n]), "drawn": torch.tensor(rollout[b, :n]), "n": n}
        weigh(answer := SimpleNamespace(**answer), args)
        expected[b, :n] = answer.weights
        cut, dropped = cut + answer.cut, dropped + answer.dropped
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
    given = {"is_weight": expected.sum(), "is_cut": cut, "is_dropped": dropped}
    check_metrics(metrics, given)


def test_rollout_weights_of_the_paper_by_hand():
    """IcePop's 0.5 and 5; TIS truncated at 2. Both where probabilities are e^200 apart."""
    log_ratios = torch.tensor([[math.log(x) for x in (0.49, 0.51, 1.0, 1.99, 2.01, 4.99, 5.01)]])
    extreme = torch.tensor([[200.0, -200.0]])
    train, mask = torch.cat([log_ratios, extreme], dim=1), torch.ones(1, 9, dtype=torch.bool)
    rollout = torch.zeros(1, 9)
    weights, metrics = losses.rollout_weights(train, rollout, mask, "icepop", 0.5, 5.0)
    assert_close(weights, [[0.0, 0.51, 1.0, 1.99, 2.01, 4.99, 0.0, 0.0, 0.0]])
    check_metrics(metrics, {"is_weight": 10.5, "is_cut": 4.0, "is_dropped": 0.0})
    weights, metrics = losses.rollout_weights(train, rollout, mask, "tis", 0.0, 2.0)
    assert_close(weights, [[0.49, 0.51, 1.0, 1.99, 2.0, 2.0, 2.0, 2.0, 0.0]])
    check_metrics(metrics, {"is_weight": 11.99, "is_cut": 4.0, "is_dropped": 0.0})


@pytest.mark.parametrize("how", ["off", *CORRECTIONS])
def test_equal_probabilities_have_weight_one(how):
    """The ends of icepop's range belong to it."""
    logprobs = torch.tensor([[-0.3, -7.1, math.nan]])
    mask = torch.tensor([[True, True, False]])
    weights, metrics = losses.rollout_weights(logprobs, logprobs, mask, how, 1.0, 1.0)
    assert weights.tolist() == [[1.0, 1.0, 0.0]]
    check_metrics(metrics, {"is_weight": 2.0, "is_cut": 0.0, "is_dropped": 0.0})
