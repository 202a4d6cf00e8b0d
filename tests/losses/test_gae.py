"""KL estimators, rewards, GAE, whitening and adaptive KL, against float64 NumPy loops."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from float64_step import gae
from loss_rows import SEEDS, answer_lens, assert_close, mask_of, with_garbage

from dschat import losses

# ---- KL


def test_kl_estimators_by_hand():
    logprobs, ref = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.5, -1.0, -0.5])
    assert_close(losses.kl_penalty(logprobs, ref, "k1"), [0.5, -1.0, 0.0])
    assert_close(losses.kl_penalty(logprobs, ref, "k2"), [0.125, 0.5, 0.0])
    k3 = [math.exp(-0.5) - 1 + 0.5, math.e - 1 - 1, 0.0]
    assert_close(losses.kl_penalty(logprobs, ref, "k3"), k3)
    assert_close(losses.kl_penalty(logprobs.bfloat16(), ref.bfloat16(), "k3"), k3)
    with pytest.raises(AssertionError, match="k4"):
        losses.kl_penalty(logprobs, ref, "k4")


@pytest.mark.parametrize(
    ("estimator", "slope"),
    [("k1", lambda d: 1.0), ("k2", lambda d: d), ("k3", lambda d: 1 - math.exp(-d))],
)
def test_slope_of_the_kl_estimators(estimator, slope):
    differences = [-3.0, -0.5, -1e-3, 0.0, 1e-3, 0.5, 3.0]
    ref = torch.full((7,), -2.0)
    logprobs = (ref + torch.tensor(differences)).requires_grad_()
    losses.kl_penalty(logprobs, ref, estimator).sum().backward()
    exact = [slope(float(d)) for d in (logprobs.detach() - ref).double()]
    assert_close(logprobs.grad, exact)


# ---- rewards, advantages


def naive_rewards(scores, kl, lens, kl_coef, clip):
    out = np.zeros(kl.shape)
    for b, n in enumerate(lens):
        for t in range(n):
            out[b, t] = -kl_coef * kl[b, t]
        if n:
            out[b, n - 1] += min(max(scores[b], -clip), clip)
    return out


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("all_truncated", [False, True])
def test_rewards_and_gae(seed, all_truncated):
    rng = np.random.default_rng(seed)
    rows, width = 7, int(rng.integers(1, 9))
    lens = [width] * rows if all_truncated else answer_lens(rng, rows, width)
    mask = mask_of(lens, width)
    scores, kl = rng.normal(0, 6, rows), rng.normal(0, 1, (rows, width))
    values = rng.normal(0, 2, (rows, width))
    gamma, lam = float(rng.choice([1.0, 0.9])), float(rng.choice([0.95, 0.0, 1.0]))

    dirty_scores = torch.tensor(scores, dtype=torch.float32)
    dirty_scores[[n == 0 for n in lens]] = float("nan")
    clipped = losses.clip_scores(dirty_scores, 5.0)
    rewards = losses.shape_rewards(clipped, with_garbage(kl, mask, rng), mask, 0.1)
    expected = naive_rewards(scores, kl, lens, 0.1, 5.0)
    assert_close(rewards, expected)

    advantages, returns = losses.gae(
        with_garbage(expected, mask, rng), with_garbage(values, mask, rng), mask, gamma, lam
    )
    expected_advantages = np.zeros(expected.shape)
    for b, n in enumerate(lens):
        answer = SimpleNamespace(n=n, rewards=expected[b], values=values[b])
        expected_advantages[b, :n] = gae(answer, gamma, lam)
    assert_close(advantages, expected_advantages, atol=2e-6)
    expected_returns = np.where(mask.numpy(), expected_advantages + values, 0.0)
    assert_close(returns, expected_returns, atol=2e-6)


def test_rewards_and_gae_by_hand():
    mask = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
    kl = torch.tensor([[0.5, -1.0, 9.0], [2.0, 9.0, 9.0], [9.0, 9.0, 9.0]])
    scores = losses.clip_scores(torch.tensor([7.0, -1.0, 3.0]), 5.0)
    rewards = losses.shape_rewards(scores, kl, mask, 0.1)
    assert_close(rewards, [[-0.05, 5.1, 0.0], [-1.2, 0.0, 0.0], [0.0, 0.0, 0.0]])
    values = torch.tensor([[1.0, 2.0, 9.0], [0.5, 9.0, 9.0], [9.0, 9.0, 9.0]])
    advantages, returns = losses.gae(rewards, values, mask, gamma=0.9, lam=0.5)
    # row 0: delta_1 = 5.1 - 2 = 3.1; delta_0 = -0.05 + 0.9 * 2 - 1 = 0.75; A_0 = 0.75 + 0.45 * 3.1
    assert_close(advantages, [[2.145, 3.1, 0.0], [-1.7, 0.0, 0.0], [0.0, 0.0, 0.0]])
    assert_close(returns, [[3.145, 5.1, 0.0], [-1.2, 0.0, 0.0], [0.0, 0.0, 0.0]])


def test_between_two_turns_nothing_happens():
    """The environment's tokens are no steps: as if they were not there."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.tensor([[1, 1, 0, 0, 1, 0], [0, 1, 1, 0, 0, 1], [1, 1, 1, 1, 1, 1]]).bool()
    rewards, values = (torch.randn(3, 6, generator=generator) for _ in range(2))
    got = losses.gae(rewards, values, mask, 0.9, 0.8)
    for row, keep in enumerate(mask):
        parts = rewards[row, keep][None], values[row, keep][None], keep[keep][None]
        alone = losses.gae(*parts, 0.9, 0.8)
        for whole, part in zip(got, alone, strict=True):
            torch.testing.assert_close(whole[row, keep], part[0])
            assert not whole[row, ~keep].any()


# ---- whitening


@pytest.mark.parametrize("seed", SEEDS)
def test_whitening_over_two_ranks(seed):
    rng = np.random.default_rng(seed)
    width = 6
    lens = answer_lens(rng, 6, width)
    mask = mask_of(lens, width)
    x = rng.normal(3, 2, (6, width)).astype(np.float32).astype(np.float64)
    dirty = with_garbage(x, mask, rng)

    kept = [x[b, t] for b, n in enumerate(lens) for t in range(n)]
    mean = sum(kept) / len(kept)
    variance = sum((v - mean) ** 2 for v in kept) / len(kept)
    expected = np.where(mask.numpy(), (x - mean) / math.sqrt(variance + 1e-8), 0.0)

    # Rank 0 holds the first row only, which has no action at all.
    parts = [losses.masked_whiten_stats(dirty[s], mask[s]) for s in (slice(0, 1), slice(1, None))]
    assert all(stat.dtype == torch.float64 for part in parts for stat in part)
    stats = [a + b for a, b in zip(*parts, strict=True)]
    assert float(stats[0]) == len(kept)
    whitened = [losses.whiten(dirty[s], mask[s], *stats) for s in (slice(0, 1), slice(1, None))]
    assert_close(torch.cat(whitened), expected)


def test_whitening_far_from_zero_keeps_its_digits():
    x = torch.tensor([[4096.0, 4096.5, 4097.0, 4097.5]])  # mean / std = 7,300; exact in fp32
    mask = torch.ones_like(x, dtype=torch.bool)
    whitened = losses.whiten(x, mask, *losses.masked_whiten_stats(x, mask))
    sd = math.sqrt(0.3125 + 1e-8)
    assert_close(whitened, [[-0.75 / sd, -0.25 / sd, 0.25 / sd, 0.75 / sd]])


@pytest.mark.parametrize("kept", [[], [2.5], [2.5, 2.5, 2.5]])
def test_whitening_without_spread_gives_zeros(kept):
    x = torch.tensor([[*kept, float("nan")]])
    mask = torch.tensor([[True] * len(kept) + [False]])
    whitened = losses.whiten(x, mask, *losses.masked_whiten_stats(x, mask))
    assert (whitened == 0).all()


def test_whitening_one_element_of_a_population_of_one_shifts_only():
    one = torch.tensor(1.0, dtype=torch.float64)
    shifted = losses.whiten(torch.tensor([3.0]), torch.tensor([True]), one, one * 2.5, one * 2.5**2)
    assert_close(shifted, [0.5])


# ---- the KL coefficient


def test_adaptive_kl_by_hand():
    controller = losses.AdaptiveKL(init=0.1, target=6.0, horizon=100)
    controller.update(kl=6.6, n=10)  # error 0.1: a factor of 1 + 0.1 * 10 / 100
    assert controller.value == pytest.approx(0.1 * 1.01)
    controller.update(kl=60.0, n=10)  # error clipped to 0.2
    assert controller.value == pytest.approx(0.1 * 1.01 * 1.02)
    controller.update(kl=-3.0, n=10)  # k1 may be negative; error clipped to -0.2
    assert controller.value == pytest.approx(0.1 * 1.01 * 1.02 * 0.98)


def test_adaptive_kl_is_fixed_without_a_target_and_ignores_nan():
    fixed = losses.AdaptiveKL(init=0.1, target=None, horizon=100)
    fixed.update(kl=50.0, n=10)
    assert fixed.value == 0.1
    adaptive = losses.AdaptiveKL(init=0.1, target=6.0, horizon=100)
    adaptive.update(kl=float("nan"), n=10)
    assert adaptive.value == 0.1


def test_adaptive_kl_never_turns_negative():
    controller = losses.AdaptiveKL(init=0.1, target=6.0, horizon=1)
    controller.update(kl=0.0, n=64)  # 1 - 0.2 * 64 would be -11.8
    assert controller.value == pytest.approx(0.08)
