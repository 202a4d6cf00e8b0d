"""PPO's policy and value losses, token by token, against float64 NumPy loops."""

import math

import numpy as np
import pytest
import torch
from loss_rows import SEEDS, answer_lens, assert_close, check_metrics, mask_of, with_garbage

from dschat import losses


def naive_policy(logprobs, old, advantages, lens, eps):
    """Loss, gradient with respect to logprobs, and metrics, token by token."""
    loss, grad = 0.0, np.zeros(logprobs.shape)
    metrics = dict.fromkeys(("clipped", "approxkl", "ratio", "ratio_abs_dev", "tokens"), 0.0)
    for b, n in enumerate(lens):
        for t in range(n):
            difference = logprobs[b, t] - old[b, t]
            ratio, advantage = math.exp(difference), advantages[b, t]
            surrogate = min(ratio * advantage, min(max(ratio, 1 - eps), 1 + eps) * advantage)
            loss -= surrogate
            too_far = ratio > 1 + eps if advantage > 0 else ratio < 1 - eps
            grad[b, t] = 0.0 if too_far else -advantage * ratio
            metrics["clipped"] += too_far
            metrics["approxkl"] += 0.5 * difference**2
            metrics["ratio"] += ratio
            metrics["ratio_abs_dev"] += abs(ratio - 1)
            metrics["tokens"] += 1
    return loss, grad, metrics


@pytest.mark.parametrize("seed", SEEDS)
def test_policy_loss(seed):
    rng = np.random.default_rng(seed)
    width = 6
    lens = answer_lens(rng, 8, width)
    mask = mask_of(lens, width)
    old = rng.normal(-2, 1, (8, width)).astype(np.float32)
    new = (old + rng.normal(0, 0.3, (8, width))).astype(np.float32)
    advantages = rng.normal(0, 1, (8, width)).astype(np.float32)
    loss, grad, metrics = naive_policy(
        new.astype(float), old.astype(float), advantages.astype(float), lens, 0.2
    )
    assert 0 < metrics["clipped"] < metrics["tokens"]  # both branches are exercised

    logprobs = with_garbage(new, mask, rng).requires_grad_()
    actual, actual_metrics = losses.policy_loss(
        logprobs, with_garbage(old, mask, rng), with_garbage(advantages, mask, rng), mask, 0.2
    )
    assert_close(actual, loss)
    actual.backward()
    assert_close(logprobs.grad, grad)
    check_metrics(actual_metrics, metrics)


def test_policy_loss_of_the_same_policy_is_minus_the_advantages():
    logprobs = torch.tensor([[-1.0, -3.0]], requires_grad=True)
    advantages = torch.tensor([[2.0, -0.5]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    loss, metrics = losses.policy_loss(logprobs, logprobs, advantages, mask, 0.2)
    assert_close(loss, -1.5)
    loss.backward()  # no gradient through old_logprobs, even where it is the same tensor
    assert_close(logprobs.grad, [[-2.0, 0.5]])
    assert float(metrics["ratio"]) == 2.0
    assert float(metrics["ratio_abs_dev"]) == 0.0


def test_policy_loss_in_bf16_is_computed_in_fp32():
    logprobs = torch.tensor([[-1.0078125]]).bfloat16()
    old = torch.tensor([[-1.0]]).bfloat16()
    mask = torch.ones(1, 1, dtype=torch.bool)
    loss, _ = losses.policy_loss(logprobs, old, torch.ones(1, 1).bfloat16(), mask, 0.2)
    assert_close(loss, -math.exp(-0.0078125))


@pytest.mark.parametrize("seed", SEEDS)
def test_value_loss(seed):
    rng = np.random.default_rng(seed)
    width, eps = 6, 0.2
    lens = answer_lens(rng, 8, width)
    mask = mask_of(lens, width)
    old = rng.normal(0, 1, (8, width)).astype(np.float32)
    new = (old + rng.normal(0, 0.3, (8, width))).astype(np.float32)
    returns = rng.normal(0, 1, (8, width)).astype(np.float32)

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


@pytest.mark.parametrize("rows", [0, 3])
def test_a_batch_without_actions_gives_zero_loss_and_zero_gradient(rows):
    mask = torch.zeros(rows, 4, dtype=torch.bool)
    junk = torch.full((rows, 4), float("nan"))
    for loss_of in (
        lambda x: losses.policy_loss(x, junk, junk, mask, 0.2)[0],
        lambda x: losses.value_loss(x, junk, junk, mask, 0.2)[0],
    ):
        x = junk.clone().requires_grad_()
        loss = loss_of(x)
        loss.backward()
        assert loss.item() == 0.0
        assert (x.grad == 0).all()


def test_sums_do_not_depend_on_how_the_batch_is_split():
    rng = np.random.default_rng(9)
    lens = answer_lens(rng, 8, 5)
    mask = mask_of(lens, 5)
    new, old, advantages = (torch.tensor(rng.normal(0, 0.3, (8, 5))) for _ in range(3))
    whole, metrics = losses.policy_loss(new, old, advantages, mask, 0.2)
    parts = [
        losses.policy_loss(new[s], old[s], advantages[s], mask[s], 0.2)
        for s in (slice(0, 1), slice(1, 6), slice(6, 8))
    ]
    assert_close(whole, sum(float(loss) for loss, _ in parts))
    check_metrics(metrics, {k: sum(float(m[k]) for _, m in parts) for k in metrics})
