"""Log-probs, entropy and the language-model loss against float64, and slopes of the KL estimators.

References are NumPy loops over tokens, autograd of the plain formula, and sums over a whole small
vocabulary.
"""

import math

import numpy as np
import pytest
import torch
from loss_rows import as_np, assert_close

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


# ---- entropy with a gradient


def exact_entropy(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """-sum p log p over the tokens of float64 ``logits`` (B, T, V) that are possible at all."""
    rows = []
    for row in logits.flatten(0, 1):
        z = row[row > -math.inf] / temperature
        p = z.exp() / z.exp().sum()
        rows.append(-(p * p.log()).sum())
    return torch.stack(rows).reshape(logits.shape[:2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5, 0.0])
@pytest.mark.parametrize("chunk_elements", [1, 40, 1 << 22])
def test_token_entropy_and_gradient(monkeypatch, dtype, temperature, chunk_elements):
    monkeypatch.setattr(losses.logprobs, "_CHUNK_ELEMENTS", chunk_elements)
    rng = np.random.default_rng(0)
    logits = torch.tensor(rng.normal(0, 3, (3, 4, 9))).to(dtype)
    logits[0, 1, 2:5] = -math.inf  # a padded vocabulary, or a token ruled out
    logits[1, 0, 1:] = -math.inf  # certain: entropy 0, gradient 0
    upstream = torch.tensor(rng.normal(size=(3, 4)), dtype=torch.float32)

    exact = logits.double().requires_grad_()
    expected = exact_entropy(exact, temperature or 1.0)
    (expected * upstream.double()).sum().backward()

    logits.requires_grad_()
    entropy = losses.token_entropy(logits, temperature)
    assert_close(entropy, as_np(expected))
    (entropy * upstream).sum().backward()
    assert logits.grad.dtype == dtype
    unit = torch.finfo(dtype).eps  # the gradient is rounded once, to the logits' dtype
    np.testing.assert_allclose(as_np(logits.grad), as_np(exact.grad), rtol=2 * unit, atol=2e-6)


def test_token_entropy_of_large_logits_does_not_overflow():
    logits = torch.tensor([[[500.0, 500.0, -500.0, 0.0]]], requires_grad=True)
    entropy = losses.token_entropy(logits)
    entropy.sum().backward()
    assert_close(entropy, [[math.log(2)]])
    assert_close(logits.grad, [[[0.0] * 4]])


def test_token_entropy_by_hand():
    """Probabilities 1/2, 1/4, 1/4: 1.5 bits. dH/dz_v = -p_v (log p_v + H), in bits times log 2."""
    logits = torch.tensor([[[0.5, 0.25, 0.25]]]).log().requires_grad_()
    entropy = losses.token_entropy(logits)
    assert_close(entropy, [[1.5 * math.log(2)]])
    entropy.sum().backward()
    expected = [-p * math.log(2) * (bits + 1.5) for p, bits in [(0.5, -1), (0.25, -2), (0.25, -2)]]
    assert_close(logits.grad, [[expected]])
    hot = losses.token_entropy(2 * logits.detach(), temperature=2.0)
    assert_close(hot, [[1.5 * math.log(2)]])


def test_garbage_logits_under_a_mask_do_not_reach_the_entropy_gradient():
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1))
    logits[0, 1] = math.nan
    logits[0, 2, 0] = math.inf
    logits[1, 2] = -math.inf
    logits.requires_grad_()
    mask = torch.tensor([[True, False, False], [True, True, False]])
    torch.where(mask, losses.token_entropy(logits), 0.0).sum().backward()
    assert torch.isfinite(logits.grad).all()
    assert (logits.grad[~mask] == 0).all()
    assert (logits.grad[mask] != 0).any(dim=-1).all()


def test_token_entropy_takes_a_slice_of_the_logits():
    logits = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(2)).requires_grad_()
    entropy = losses.token_entropy(logits[:, :-1])
    assert_close(entropy, as_np(exact_entropy(logits.detach()[:, :-1].double(), 1.0)))
    entropy.sum().backward()
    assert (logits.grad[:, -1] == 0).all()
    assert (logits.grad[:, :-1] != 0).all()


def test_entropy_from_logits_is_token_entropy_without_a_gradient():
    logits = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(3)).requires_grad_()
    seen = losses.entropy_from_logits(logits, 0.7)
    assert not seen.requires_grad
    assert_close(seen, as_np(losses.token_entropy(logits, 0.7)))


# ---- KL as a term of the loss


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


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_expected_slope_of_the_kl_estimators(estimator):
    """E over the policy's own samples, by the logits of a softmax: k1's vanishes, k2's is that of
    KL(policy || reference), k3's that of KL(reference || policy). Both KLs by autograd in float64.
    """
    policy = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    log_ref = torch.tensor([-0.2, 0.4, 0.0, 1.0], dtype=torch.float64).log_softmax(0)
    log_policy = policy.log_softmax(0)
    samples = losses.kl_penalty(log_policy, log_ref, estimator)
    (actual,) = torch.autograd.grad(
        (log_policy.exp().detach() * samples).sum(), policy, retain_graph=True
    )
    divergence = {
        "k1": torch.zeros((), dtype=torch.float64) * policy.sum(),
        "k2": (log_policy.exp() * (log_policy - log_ref)).sum(),
        "k3": (log_ref.exp() * (log_ref - log_policy)).sum(),
    }[estimator]
    (expected,) = torch.autograd.grad(divergence, policy)
    np.testing.assert_allclose(as_np(actual), as_np(expected), rtol=1e-5, atol=1e-7)
    if estimator != "k1":
        assert (actual.abs() > 1e-3).all()
