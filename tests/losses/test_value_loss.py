"""The value loss, token by token, against a float64 NumPy loop."""

import numpy as np
import pytest
import torch
from loss_rows import SEEDS, answer_lens, assert_close, check_metrics, mask_of, with_garbage

from dschat import losses


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
    values = junk.clone().requires_grad_()
    loss, _ = losses.value_loss(values, junk, junk, mask, 0.2)
    loss.backward()
    assert loss.item() == 0.0
    assert (values.grad == 0).all()
