"""Log-probs and entropies, from logits and from hidden states, against plain float64: values,
gradients, chunks and memory.
"""

import math
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from loss_rows import as_np
from quick import slow
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from dschat import losses
from dschat.losses import linear_logprobs, linear_top_ids

M, D, V = 8, 5, 11


def from_logits(hidden, weight, bias, targets, temperature=1.0, with_entropy=False):
    """`linear_logprobs` of given logits."""
    logits = F.linear(hidden, weight, bias)
    return linear_logprobs(logits, None, None, targets, temperature, with_entropy)


def entropies(logits, temperature=1.0):
    """(B, T) of logits (B, T, V)."""
    ids = torch.zeros(logits.shape[:-1]).long().flatten()
    results = linear_logprobs(logits.flatten(0, 1), None, None, ids, temperature, True)
    return results[1].view(logits.shape[:-1])


either = pytest.mark.parametrize("function", [linear_logprobs, from_logits])


@pytest.fixture(autouse=True)
def chunks(monkeypatch):
    """``chunks(num_elements)``: of any number of rows, as many as have so many logits."""
    monkeypatch.setattr(losses.logprobs, "_CHUNK_ROWS", 1)

    return partial(monkeypatch.setattr, losses.logprobs, "_HEAD_CHUNK_ELEMENTS")


def inputs(num_rows=M, dtype=torch.float32):
    """hidden (M, D), weight (V, D), bias (V,), targets (M,); logits of a few units."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_rows, D, generator=generator).to(dtype)
    weight = torch.randn(V, D, generator=generator).to(dtype)
    bias = torch.randn(V, generator=generator).to(dtype)
    return hidden, weight, bias, torch.randint(0, V, (num_rows,), generator=generator)


def exact(hidden, weight, bias, targets, temperature, with_entropy=True):
    """The plain formulas in float64: log-probs and entropies, differentiable."""
    logits = hidden @ weight.T + (0 if bias is None else bias)
    log_probs = (logits / (temperature or 1.0)).log_softmax(-1)
    picked = log_probs.gather(1, targets.view(len(targets), -1)).view_as(targets)
    return picked, -(log_probs.exp() * log_probs).sum(-1) if with_entropy else None


def trained(tensors):
    return [None if x is None else x.requires_grad_() for x in tensors]


def in_double(tensors):
    """Copies that need a gradient where ``tensors`` do."""
    return [
        None if x is None else x.detach().double().requires_grad_(x.requires_grad) for x in tensors
    ]


def assert_close(actual: Tensor | None, expected: Tensor | None, tolerance: float) -> None:
    """Equal relative to the largest of ``expected``."""
    if actual is None or expected is None:
        assert actual is expected
        return
    assert actual.shape == expected.shape
    gap = (actual.detach().double() - expected.detach()).abs().max()
    scale = expected.detach().abs().max()
    assert gap <= tolerance * max(1.0, float(scale)), (actual, expected)


def assert_equal_gradients(results, tensors, references, doubles, tolerance=3e-6):
    """Of a sum of both results with weights that all differ."""
    for pair in (results, references):
        used = [x for x in pair if x is not None]
        upstream = [
            torch.linspace(-1, 2, x.numel()).view_as(x).flip(0) + i for i, x in enumerate(used)
        ]
        sum((x * scale).sum() for x, scale in zip(used, upstream, strict=True)).backward()
    for ours, exact_one in zip(tensors, doubles, strict=True):
        if ours is not None:
            assert_close(ours.grad, exact_one.grad, tolerance)


@pytest.mark.parametrize("rows_per_chunk", [1, 3, 100, *slow([0, 2, M])])
@pytest.mark.parametrize("temperature", [0.7, 0.0, *slow([1.0, 2.5])])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@either
def test_values_and_gradients(
    function, chunks, rows_per_chunk, temperature, with_entropy, has_bias
):
    chunks(max(1, rows_per_chunk * V))
    hidden, weight, bias, targets = inputs()
    tensors = trained([hidden, weight, bias if has_bias else None])
    doubles = in_double(tensors)
    expected = exact(*doubles, targets, temperature, with_entropy)
    actual = function(*tensors, targets, temperature, with_entropy)
    for value, reference in zip(actual, expected, strict=True):
        assert_close(value, reference, 2e-6)
        assert value is None or value.dtype == torch.float32
    assert_equal_gradients(actual, tensors, expected, doubles)


@pytest.mark.parametrize("rows_per_chunk", [2, 100])
@pytest.mark.parametrize("names", ["hidden", "weight", "bias", "hidden bias", "weight bias"])
def test_what_is_frozen_gets_no_gradient(chunks, rows_per_chunk, names):
    chunks(rows_per_chunk * V)
    *tensors, targets = inputs()
    for name, tensor in zip(("hidden", "weight", "bias"), tensors, strict=True):
        tensor.requires_grad_(name in names.split())
    doubles = in_double(tensors)
    results = linear_logprobs(*tensors, targets, 0.7, True), exact(*doubles, targets, 0.7)
    assert_equal_gradients(results[0], tensors, results[1], doubles)


@pytest.mark.parametrize("used", [0, 1])
def test_one_of_both_results_is_enough_for_a_gradient(used):
    *tensors, targets = inputs()
    doubles = in_double(trained(tensors))
    linear_logprobs(*tensors, targets, 0.7, True)[used].sum().backward()
    exact(*doubles, targets, 0.7)[used].sum().backward()
    assert_close(tensors[0].grad, doubles[0].grad, 3e-6)


@pytest.mark.parametrize("rows_per_chunk", [2, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_results_are_fp32_and_gradients_16_bit(chunks, rows_per_chunk, dtype):
    """Only logits and the gradients' last step round: to a few units of the dtype."""
    chunks(rows_per_chunk * V)
    *tensors, targets = inputs(dtype=dtype)
    doubles = in_double(trained(tensors))
    actual, expected = linear_logprobs(*tensors, targets, 1.0, True), exact(*doubles, targets, 1.0)
    tolerance = 4 * torch.finfo(dtype).eps
    for value, reference in zip(actual, expected, strict=True):
        assert value.dtype == torch.float32
        assert_close(value, reference, tolerance)
    (actual[0].sum() + actual[1].sum()).backward()
    (expected[0].sum() + expected[1].sum()).backward()
    for value, reference in zip(tensors, doubles, strict=True):
        assert value.grad.dtype == dtype
        assert_close(value.grad, reference.grad, tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_of_16_bit_logits_only_the_gradient_is_rounded(chunks, dtype):
    chunks(40)
    rng = np.random.default_rng(0)
    logits = torch.tensor(rng.normal(0, 4, (3, 5, V))).to(dtype)
    logits[1, 2] += 60  # exp overflows in fp16 and, unshifted, loses digits everywhere
    targets = torch.tensor(rng.integers(0, V, (3, 5)))
    for number in (0, 1):  # log-probs, entropies
        given = logits.flatten(0, 1).requires_grad_()
        double = given.detach().double().requires_grad_()
        expected = exact(double, torch.eye(V).double(), None, targets.flatten(), 0.7)[number]
        actual = linear_logprobs(given, None, None, targets.flatten(), 0.7, True)[number]
        assert actual.dtype == torch.float32
        np.testing.assert_allclose(as_np(actual), as_np(expected), rtol=1e-5, atol=2e-5)
        (actual * torch.arange(15)).sum().backward()
        (expected * torch.arange(15)).sum().backward()
        assert given.grad.dtype == dtype
        unit = torch.finfo(dtype).eps
        np.testing.assert_allclose(as_np(given.grad), as_np(double.grad), rtol=2 * unit, atol=1e-5)


def test_16_bit_sums_over_many_chunks_do_not_stall(chunks):
    """1024 equal rows, one a chunk: a bf16 sum would stop growing near 256 of them."""
    chunks(1)
    hidden, weight, bias, targets = inputs(1, torch.bfloat16)
    hidden, targets = hidden.repeat(1024, 1), targets.repeat(1024)
    tensors = [hidden, *trained([weight, bias])]
    doubles = in_double(tensors)
    linear_logprobs(*tensors, targets)[0].sum().backward()
    exact(*doubles, targets, 1.0)[0].sum().backward()
    for value, reference in zip(tensors[1:], doubles[1:], strict=True):
        gap = (value.grad.double() - reference.grad).abs().max() / reference.grad.abs().max()
        assert gap < 0.02


# ---- awkward logits


@pytest.mark.parametrize("rows_per_chunk", [1, 100])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e30])
def test_garbage_under_a_mask_does_not_reach_other_rows(
    chunks, rows_per_chunk, with_entropy, garbage
):
    """A masked row's gradient is 0 in ``hidden``; it may not make the weight's NaN either."""
    chunks(rows_per_chunk * V)
    hidden, weight, bias, targets = inputs()
    masked = torch.tensor([False, True, False, False, True, True, False, True])
    hidden[masked] = garbage
    tensors = trained([hidden, weight, bias])
    doubles = in_double(trained([hidden.detach()[~masked], weight, bias]))
    results = linear_logprobs(*tensors, targets, 1.0, with_entropy)
    expected = exact(*doubles, targets[~masked], 1.0, with_entropy)
    for values in (results, expected):
        kept = [v for v in values if v is not None]
        sum(torch.where(masked, 0.0, v).sum() if len(v) == M else v.sum() for v in kept).backward()
    assert (hidden.grad[masked] == 0).all()
    assert_close(hidden.grad[~masked], doubles[0].grad, 3e-6)
    assert_close(weight.grad, doubles[1].grad, 3e-6)
    assert_close(bias.grad, doubles[2].grad, 3e-6)


def token_logprobs(logits):
    """(B, T) of token 1, of logits (B, T, V)."""
    ids = torch.ones(logits.shape[:-1]).long()
    return linear_logprobs(logits.flatten(0, 1), None, None, ids.flatten())[0].view_as(ids)


@pytest.mark.parametrize("function", [entropies, token_logprobs])
def test_garbage_logits_under_a_mask_do_not_reach_the_gradient(function):
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1))
    logits[0, 1] = math.nan
    logits[0, 2, 0] = math.inf
    logits[1, 2] = -math.inf
    logits.requires_grad_()
    mask = torch.tensor([[True, False, False], [True, True, False]])
    torch.where(mask, function(logits), 0.0).sum().backward()
    assert torch.isfinite(logits.grad).all()
    assert (logits.grad[~mask] == 0).all()
    assert (logits.grad[mask] != 0).any(dim=-1).all()


@either
def test_a_ruled_out_token_adds_nothing(function):
    """A bias of -inf: probability 0, entropy's p log p is 0 and no gradient is NaN."""
    hidden, weight, bias, targets = inputs()
    bias[10], targets[targets == 10] = -math.inf, 0
    tensors = trained([hidden, weight, bias])
    doubles = in_double(trained([hidden.detach(), weight.detach()[:10], bias.detach()[:10]]))
    actual, expected = function(*tensors, targets, 1.0, True), exact(*doubles, targets, 1.0)
    for value, reference in zip(actual, expected, strict=True):
        assert_close(value, reference, 2e-6)
    (actual[0].sum() + actual[1].sum()).backward()
    (expected[0].sum() + expected[1].sum()).backward()
    assert_close(hidden.grad, doubles[0].grad, 3e-6)
    assert_close(weight.grad[:10], doubles[1].grad, 3e-6)
    assert (weight.grad[10] == 0).all()
    assert bias.grad[10] == 0


@pytest.mark.parametrize("with_entropy", [False, True])
@either
def test_no_rows_give_gradients_of_zero(function, with_entropy):
    """A rank without rows takes part in every backward pass: each weight needs a gradient."""
    *tensors, targets = inputs(0)
    trained(tensors)
    logprobs, entropy = function(*tensors, targets, 1.0, with_entropy)
    assert logprobs.shape == (0,)
    (logprobs.sum() + (entropy.sum() if entropy is not None else 0.0)).backward()
    assert tensors[0].grad.shape == (0, D)
    assert (tensors[1].grad == 0).all()
    assert (tensors[2].grad == 0).all()


def test_large_logits_do_not_overflow():
    hidden, weight = torch.tensor([[1000.0], [-1000.0]]), torch.tensor([[1.0], [1.0], [-1.0]])
    logprobs, entropy = linear_logprobs(hidden, weight, None, torch.tensor([0, 2]), 1.0, True)
    # fp32 logits of 1000 have steps of 6e-5.
    assert logprobs.tolist() == pytest.approx([-math.log(2), 0.0], abs=1e-4)
    assert entropy.tolist() == pytest.approx([math.log(2), 0.0], abs=1e-3)


@pytest.mark.parametrize(
    ("logits", "bits", "slopes"),
    [
        # Probabilities 1/2, 1/4, 1/4. dH/dz_v = -p_v (log p_v + H), in bits times log 2.
        ([-1.0, -2.0, -2.0], 1.5, [-0.5 * 0.5, 0.25 * 0.5, 0.25 * 0.5]),
        ([500.0, 500.0, -500.0, 0.0], 1.0, [0.0] * 4),
        ([0.0, -math.inf, -math.inf], 0.0, [0.0] * 3),  # certain
    ],
)
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_entropies_by_hand(logits, bits, slopes, temperature):
    in_nats = torch.tensor([[logits]]) * math.log(2) * temperature
    entropy = entropies(in_nats.requires_grad_(), temperature)
    assert entropy.item() == pytest.approx(bits * math.log(2), rel=1e-5, abs=1e-6)
    entropy.sum().backward()
    expected = [slope * math.log(2) / temperature for slope in slopes]
    assert in_nats.grad.flatten().tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


@either
def test_a_negative_temperature_is_refused(function):
    with pytest.raises(AssertionError, match="negative"):
        function(*inputs(), temperature=-1.0)


# ---- memory


def saved_for_backward(saved):
    """A scope that appends to ``saved`` what is kept for the backward pass."""
    return torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x)


@pytest.mark.parametrize("with_entropy", [True, *slow([False])])
def test_no_tensor_of_positions_times_vocabulary(chunks, with_entropy):
    """Forward and backward: 4 rows a chunk of 400, where the weight is smaller than 8 rows."""
    rows, width, vocabulary = 400, 4, 1000
    chunks(4 * vocabulary)
    hidden = torch.randn(rows, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=True)
    targets = torch.zeros(rows, dtype=torch.int64)
    saved = []
    made = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with made, saved_for_backward(saved):
        logprobs, entropy = linear_logprobs(hidden, weight, None, targets, 1.0, with_entropy)
        (logprobs.sum() + (entropy.sum() if entropy is not None else 0.0)).backward()
    assert max(event.self_cpu_memory_usage for event in made.events()) == 4 * vocabulary * 4
    assert max(x.numel() for x in saved) == weight.numel()


def test_given_logits_leave_no_fp32_copy_for_backward():
    saved = []
    logits = torch.randn(2, 8, 64).bfloat16().requires_grad_()
    with saved_for_backward(saved):
        token_logprobs(logits)
    large = [x for x in saved if x.numel() >= logits.numel()]
    assert [x.data_ptr() for x in large] == [logits.data_ptr()]


# ---- several targets


@pytest.mark.parametrize("rows_per_chunk", [2, 100])
@pytest.mark.parametrize("with_entropy", [False, True])
@either
def test_several_targets_a_position(function, chunks, rows_per_chunk, with_entropy):
    """Equal ones too."""
    chunks(rows_per_chunk * V)
    *tensors, first = inputs()
    targets = torch.stack([first, torch.arange(M) % V, first], dim=1)
    doubles = in_double(trained(tensors))
    actual = function(*tensors, targets, 0.7, with_entropy)
    expected = exact(*doubles, targets, 0.7, with_entropy)
    assert_close(actual[0], expected[0], 2e-6)
    assert_equal_gradients(actual, tensors, expected, doubles)


def test_likeliest_ids(chunks):
    chunks(3 * V)
    hidden, weight, bias, _ = inputs()
    logits = (hidden.double() @ weight.double().T + bias).numpy()
    expected = [sorted(range(9), key=lambda i, row=row: -row[i])[:4] for row in logits]
    assert linear_top_ids(hidden, weight, bias, 4, 9).tolist() == expected
    assert linear_top_ids(hidden, weight, bias, 40, 9).shape == (M, 9)
