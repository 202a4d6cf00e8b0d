"""Losses against float64 NumPy, written as loops over tokens that share no code with them.

Rows are those of `loss_rows`. Advantages without a critic, and losses beside PPO's own, have tests
of their own in `tests/losses`.
"""

import math

import numpy as np
import pytest
import torch
from loss_rows import (
    SEEDS,
    answer_lens,
    as_np,
    assert_close,
    check_metrics,
    mask_of,
    with_garbage,
)

from dschat import losses


def naive_log_softmax(row: np.ndarray, temperature: float) -> np.ndarray:
    """float64 log-probs of one position."""
    z = [float(v) / temperature for v in row]
    top = max(z)
    log_total = top + math.log(sum(math.exp(v - top) for v in z))
    return np.array([v - log_total for v in z])


# ---- log-probs and entropy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("chunk_elements", [1, 40, 150, 1 << 22])
def test_token_logprobs_and_gradient(monkeypatch, dtype, temperature, chunk_elements):
    monkeypatch.setattr(losses.logprobs, "_CHUNK_ELEMENTS", chunk_elements)
    rng = np.random.default_rng(0)
    logits = torch.tensor(rng.normal(0, 4, (3, 5, 11))).to(dtype)
    logits[1, 2] += 60  # exp overflows in fp16 and, unshifted, loses digits everywhere
    targets = torch.tensor(rng.integers(0, 11, (3, 5)))
    weights = torch.tensor(rng.normal(size=(3, 5)), dtype=torch.float32)
    t = temperature or 1.0

    expected, expected_grad = np.zeros((3, 5)), np.zeros((3, 5, 11))
    for b in range(3):
        for s in range(5):
            log_p = naive_log_softmax(as_np(logits[b, s]), t)
            expected[b, s] = log_p[targets[b, s]]
            for v in range(11):
                onehot = 1.0 if v == targets[b, s] else 0.0
                expected_grad[b, s, v] = float(weights[b, s]) * (onehot - math.exp(log_p[v])) / t

    logits.requires_grad_()
    logprobs = losses.token_logprobs(logits, targets, temperature)
    assert_close(logprobs, expected, rtol=1e-5, atol=2e-5)
    (logprobs * weights).sum().backward()
    assert logits.grad.dtype == dtype
    unit = torch.finfo(dtype).eps  # the gradient is rounded once, to the logits' dtype
    np.testing.assert_allclose(as_np(logits.grad), expected_grad, rtol=2 * unit, atol=1e-5)


def test_token_logprobs_takes_a_slice_and_keeps_minus_infinity():
    logits = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0))
    logits[:, :, 5] = float("-inf")  # a padded vocabulary
    logits.requires_grad_()
    targets = torch.tensor([[0, 1, 2], [3, 4, 0]])
    logprobs = losses.token_logprobs(logits[:, :-1], targets)
    for b in range(2):
        for s in range(3):
            row = naive_log_softmax(as_np(logits[b, s, :5]), 1.0)
            assert logprobs[b, s].item() == pytest.approx(row[targets[b, s]], abs=1e-6)
    logprobs.sum().backward()
    assert torch.isfinite(logits.grad).all()
    assert (logits.grad[:, :, 5] == 0).all()
    assert (logits.grad[:, -1] == 0).all()


def test_token_logprobs_saves_no_fp32_copy_for_backward():
    saved = []
    logits = torch.randn(2, 8, 64).bfloat16().requires_grad_()
    targets = torch.zeros(2, 8, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        losses.token_logprobs(logits, targets)
    large = [x for x in saved if x.numel() >= logits.numel()]
    assert [x.data_ptr() for x in large] == [logits.data_ptr()]


def test_garbage_logits_under_a_mask_do_not_reach_the_gradient():
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1))
    logits[0, 1:] = float("nan")
    logits[1, 2] = float("inf")
    logits.requires_grad_()
    mask = torch.tensor([[True, False, False], [True, True, False]])
    logprobs = losses.token_logprobs(logits, torch.ones(2, 3, dtype=torch.long))
    torch.where(mask, logprobs, 0.0).sum().backward()
    assert torch.isfinite(logits.grad).all()
    assert (logits.grad[~mask] == 0).all()
    assert (logits.grad[mask] != 0).any(dim=-1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("temperature", "chunk_elements"), [(1.0, 1), (2.5, 30), (0.0, 1 << 22)])
def test_entropy(monkeypatch, dtype, temperature, chunk_elements):
    monkeypatch.setattr(losses.logprobs, "_CHUNK_ELEMENTS", chunk_elements)
    rng = np.random.default_rng(2)
    logits = torch.tensor(rng.normal(0, 5, (2, 3, 7))).to(dtype)
    logits[0, 0, 3] = float("-inf")
    expected = np.zeros((2, 3))
    for b in range(2):
        for s in range(3):
            for log_p in naive_log_softmax(as_np(logits[b, s]), temperature or 1.0):
                expected[b, s] -= 0.0 if log_p == -math.inf else math.exp(log_p) * log_p
    assert_close(losses.entropy_from_logits(logits, temperature), expected)


def test_entropy_of_the_uniform_distribution_is_log_v():
    assert_close(losses.entropy_from_logits(torch.zeros(1, 1, 32)), [[math.log(32)]])


# ---- KL, rewards, advantages


def test_kl_estimators_by_hand():
    logprobs, ref = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.5, -1.0, -0.5])
    assert_close(losses.kl_penalty(logprobs, ref, "k1"), [0.5, -1.0, 0.0])
    assert_close(losses.kl_penalty(logprobs, ref, "k2"), [0.125, 0.5, 0.0])
    k3 = [math.exp(-0.5) - 1 + 0.5, math.e - 1 - 1, 0.0]
    assert_close(losses.kl_penalty(logprobs, ref, "k3"), k3)
    assert_close(losses.kl_penalty(logprobs.bfloat16(), ref.bfloat16(), "k3"), k3)
    with pytest.raises(AssertionError, match="k4"):
        losses.kl_penalty(logprobs, ref, "k4")


def test_kl_estimators_estimate_the_kl():
    """Summed over a small alphabet with the policy's weights, k1 and k3 are KL(p || q)."""
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
    exact = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    log_p, log_q = torch.tensor(np.log(p)), torch.tensor(np.log(q))
    for estimator in ("k1", "k3"):
        estimate = (torch.tensor(p) * losses.kl_penalty(log_p, log_q, estimator)).sum()
        assert float(estimate) == pytest.approx(exact, rel=1e-6)


def naive_rewards(scores, kl, lens, kl_coef, clip):
    out = np.zeros(kl.shape)
    for b, n in enumerate(lens):
        for t in range(n):
            out[b, t] = -kl_coef * kl[b, t]
        if n:
            out[b, n - 1] += min(max(scores[b], -clip), clip)
    return out


def naive_gae(rewards, values, lens, gamma, lam):
    """Eq. 16 as a sum: A_t = sum over l of (gamma lam)^l delta_{t+l}, no recursion."""
    advantages = np.zeros(rewards.shape)
    for b, n in enumerate(lens):
        for t in range(n):
            for k in range(t, n):
                after = values[b, k + 1] if k + 1 < n else 0.0
                delta = rewards[b, k] + gamma * after - values[b, k]
                advantages[b, t] += (gamma * lam) ** (k - t) * delta
    return advantages


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
    expected_advantages = naive_gae(expected, values, lens, gamma, lam)
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


def test_gae_of_lambda_one_is_return_minus_value():
    """With gamma = lambda = 1 returns are the rewards still to come, whatever the critic says."""
    rng = np.random.default_rng(5)
    lens = [0, 1, 6, 4]
    mask = mask_of(lens, 6)
    rewards = rng.normal(size=(4, 6))
    _, returns = losses.gae(
        with_garbage(rewards, mask, rng), torch.randn(4, 6), mask, gamma=1.0, lam=1.0
    )
    expected = [[sum(rewards[b, t:n]) for t in range(6)] for b, n in enumerate(lens)]
    assert_close(returns, np.where(mask.numpy(), expected, 0.0), atol=3e-6)


def test_gae_refuses_a_mask_with_a_gap():
    zeros = torch.zeros(1, 3)
    with pytest.raises(AssertionError, match="gap"):
        losses.gae(zeros, zeros, torch.tensor([[True, False, True]]), 1.0, 0.95)


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


# ---- policy and value


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


# ---- pairwise and language-model losses


def test_pairwise_loss_and_gradient():
    chosen = torch.tensor([1.0, -2.0, 0.5, 300.0, -300.0], requires_grad=True)
    rejected = torch.tensor([0.0, 1.0, 0.5, -300.0, 300.0], requires_grad=True)
    margins = [1.0, -3.0, 0.0, 600.0, -600.0]
    # -log sigmoid(m) = log(1 + exp(-m)); beyond 30 that is 0 or -m to every digit of a float64
    terms = [math.log1p(math.exp(-m)) if abs(m) < 30 else max(-m, 0.0) for m in margins]
    loss, metrics = losses.pairwise_loss(chosen, rejected)
    assert_close(loss, sum(terms))
    loss.backward()
    slope = [-1 / (1 + math.exp(min(m, 700.0))) for m in margins]
    assert_close(chosen.grad, slope)
    assert_close(rejected.grad, [-s for s in slope])
    expected = {"correct": 2.5, "margin": -2.0, "chosen": -0.5, "rejected": 1.5, "pairs": 5.0}
    check_metrics(metrics, expected)


def test_pairwise_loss_of_no_pairs():
    scores = torch.zeros(0, dtype=torch.bfloat16, requires_grad=True)
    loss, metrics = losses.pairwise_loss(scores, scores)
    loss.backward()
    assert loss.item() == 0.0
    check_metrics(metrics, dict.fromkeys(metrics, 0.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", SEEDS)
def test_lm_loss(dtype, seed):
    rng = np.random.default_rng(seed)
    seq_len = int(rng.integers(1, 8))
    lens = answer_lens(rng, 5, seq_len)
    logits = torch.tensor(rng.normal(0, 3, (5, seq_len, 9))).to(dtype)
    ids = torch.tensor(rng.integers(0, 9, (5, seq_len)))
    # Targets with gaps (several assistant turns), position 0 marked too: it must not count.
    mask = mask_of(lens, seq_len) & torch.tensor(rng.random((5, seq_len)) < 0.7)
    mask[2, 0] = True
    ids = torch.where(mask_of(lens, seq_len), ids, -100)

    loss, count = 0.0, 0
    grad = np.zeros(logits.shape)
    for b in range(5):
        for t in range(1, seq_len):
            if mask[b, t]:
                log_p = naive_log_softmax(as_np(logits[b, t - 1]), 1.0)
                loss -= log_p[ids[b, t]]
                count += 1
                grad[b, t - 1] = np.exp(log_p)
                grad[b, t - 1, ids[b, t]] -= 1
    used = torch.zeros(5, seq_len, dtype=torch.bool)
    used[:, :-1] = mask[:, 1:]
    logits[~used] = float("nan")
    logits.requires_grad_()

    actual, num_tokens = losses.lm_loss(logits, ids, mask)
    assert_close(actual, loss, atol=1e-5)
    assert int(num_tokens) == count
    actual.backward()
    unit = torch.finfo(dtype).eps
    np.testing.assert_allclose(as_np(logits.grad), grad, rtol=2 * unit, atol=1e-6)


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
