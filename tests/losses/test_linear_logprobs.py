"""Log-probs from hidden states against plain float64: values, gradients, chunks and memory."""

import importlib
import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dschat.losses import linear_logprobs, linear_top_ids, token_logprobs

# The package's function of that name hides it.
MODULE = importlib.import_module("dschat.losses.logprobs")
M, D, V = 7, 5, 11


@pytest.fixture(autouse=True)
def chunks(monkeypatch):
    """``chunks(num_elements)``: of any number of rows, as many as have so many logits."""
    monkeypatch.setattr(MODULE, "_CHUNK_ROWS", 1)
    return lambda num_elements: monkeypatch.setattr(MODULE, "_HEAD_CHUNK_ELEMENTS", num_elements)


def inputs(num_rows=M, dtype=torch.float32, seed=0):
    """hidden (M, D), weight (V, D), bias (V,), targets (M,); logits of a few units."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_rows, D, generator=generator).to(dtype)
    weight = torch.randn(V, D, generator=generator).to(dtype)
    bias = torch.randn(V, generator=generator).to(dtype)
    return hidden, weight, bias, torch.randint(0, V, (num_rows,), generator=generator)


def exact(hidden, weight, bias, targets, temperature):
    """The plain formulas in float64: log-probs and entropies, differentiable."""
    logits = hidden @ weight.T + (0 if bias is None else bias)
    log_probs = (logits / (temperature or 1.0)).log_softmax(-1)
    picked = log_probs[torch.arange(len(targets)), targets]
    return picked, -(log_probs.exp() * log_probs).sum(-1)


def gradients(function, tensors, upstream, upstream_entropy):
    """Gradients of a weighted sum of both results; None where ``tensors`` need none."""
    logprobs, entropy = function()
    total = (logprobs * upstream.to(logprobs.dtype)).sum()
    if entropy is not None:
        total = total + (entropy * upstream_entropy.to(entropy.dtype)).sum()
    wanted = [x for x in tensors if x is not None and x.requires_grad]
    found = iter(torch.autograd.grad(total, wanted))
    return [next(found) if x is not None and x.requires_grad else None for x in tensors]


def assert_close(actual: Tensor | None, expected: Tensor | None, tolerance: float) -> None:
    """Equal relative to the largest of ``expected``."""
    if actual is None or expected is None:
        assert actual is expected
        return
    assert actual.shape == expected.shape
    gap = (actual.detach().double() - expected.detach()).abs().max() if len(actual) else 0.0
    scale = expected.detach().abs().max() if len(actual) else 1.0
    assert gap <= tolerance * max(1.0, float(scale)), (actual, expected)


@pytest.mark.parametrize("rows_per_chunk", [1, 2, 3, M, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5, 0.0])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_values_and_gradients(chunks, rows_per_chunk, temperature, with_entropy, has_bias):
    chunks(rows_per_chunk * V)
    hidden, weight, bias, targets = inputs()
    bias = bias if has_bias else None
    tensors = [x if x is None else x.requires_grad_() for x in (hidden, weight, bias)]
    doubles = [x if x is None else x.detach().double().requires_grad_() for x in tensors]
    upstream, other = torch.linspace(-1, 2, M), torch.linspace(3, -1, M)

    expected = exact(*doubles, targets, temperature)
    if not with_entropy:
        expected = expected[0], None
    actual = linear_logprobs(*tensors, targets, temperature, with_entropy)
    for value, reference in zip(actual, expected, strict=True):
        assert_close(value, reference, 2e-6)
        assert value is None or value.dtype == torch.float32
    # A second backward needs a second forward: the kept logits may be overwritten.
    ours = gradients(
        lambda: linear_logprobs(*tensors, targets, temperature, with_entropy),
        tensors,
        upstream,
        other,
    )
    theirs = gradients(lambda: expected, doubles, upstream, other)
    for value, reference in zip(ours, theirs, strict=True):
        assert_close(value, reference, 3e-6)


@pytest.mark.parametrize("rows_per_chunk", [2, 100])
@pytest.mark.parametrize("trained", ["hidden", "weight", "bias", "hidden bias", "weight bias"])
def test_what_is_frozen_gets_no_gradient(chunks, rows_per_chunk, trained):
    chunks(rows_per_chunk * V)
    hidden, weight, bias, targets = inputs()
    tensors = [hidden, weight, bias]
    for name, tensor in zip(("hidden", "weight", "bias"), tensors, strict=True):
        tensor.requires_grad_(name in trained.split())
    doubles = [x.detach().double().requires_grad_(x.requires_grad) for x in tensors]
    ones = torch.ones(M)
    ours = gradients(lambda: linear_logprobs(*tensors, targets, 0.7, True), tensors, ones, ones)
    theirs = gradients(lambda: exact(*doubles, targets, 0.7), doubles, ones, ones)
    for value, reference in zip(ours, theirs, strict=True):
        assert_close(value, reference, 3e-6)


def test_one_of_both_results_is_enough_for_a_gradient():
    for used in (0, 1):
        hidden, weight, bias, targets = inputs()
        hidden.requires_grad_()
        double = hidden.detach().double().requires_grad_()
        linear_logprobs(hidden, weight, bias, targets, 0.7, True)[used].sum().backward()
        exact(double, weight.double(), bias.double(), targets, 0.7)[used].sum().backward()
        assert_close(hidden.grad, double.grad, 3e-6)


@pytest.mark.parametrize("rows_per_chunk", [2, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_results_are_fp32_and_gradients_16_bit(chunks, rows_per_chunk, dtype):
    """Only logits and the gradients' last step round: to a few units of the dtype."""
    chunks(rows_per_chunk * V)
    hidden, weight, bias, targets = inputs(dtype=dtype)
    tensors = [x.requires_grad_() for x in (hidden, weight, bias)]
    doubles = [x.detach().double().requires_grad_() for x in tensors]
    logprobs, entropy = linear_logprobs(*tensors, targets, 1.0, True)
    expected = exact(*doubles, targets, 1.0)
    tolerance = 4 * torch.finfo(dtype).eps
    for value, reference in zip((logprobs, entropy), expected, strict=True):
        assert value.dtype == torch.float32
        assert_close(value, reference, tolerance)
    (logprobs.sum() + entropy.sum()).backward()
    (expected[0].sum() + expected[1].sum()).backward()
    for value, reference in zip(tensors, doubles, strict=True):
        assert value.grad.dtype == dtype
        assert_close(value.grad, reference.grad, tolerance)


def test_16_bit_sums_over_many_chunks_do_not_stall(chunks):
    """1024 equal rows, one a chunk: a bf16 sum would stop growing near 256 of them."""
    chunks(1)
    hidden, weight, bias, targets = inputs(1, torch.bfloat16)
    hidden, targets = hidden.repeat(1024, 1), targets.repeat(1024)
    weight.requires_grad_()
    bias.requires_grad_()
    linear_logprobs(hidden, weight, bias, targets)[0].sum().backward()
    doubles = [x.detach().double().requires_grad_() for x in (weight, bias)]
    exact(hidden.double(), *doubles, targets, 1.0)[0].sum().backward()
    for value, reference in zip((weight, bias), doubles, strict=True):
        gap = (value.grad.double() - reference.grad).abs().max() / reference.grad.abs().max()
        assert gap < 0.02


@pytest.mark.parametrize("rows_per_chunk", [1, 100])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e30])
def test_garbage_under_a_mask_does_not_reach_other_rows(
    chunks, rows_per_chunk, with_entropy, garbage
):
    """A masked row's gradient is 0 in ``hidden``; it may not make the weight's NaN either."""
    chunks(rows_per_chunk * V)
    hidden, weight, bias, targets = inputs()
    masked = torch.tensor([False, True, False, False, True, True, False])
    hidden[masked] = garbage
    tensors = [x.requires_grad_() for x in (hidden, weight, bias)]
    logprobs, entropy = linear_logprobs(*tensors, targets, 1.0, with_entropy)
    total = torch.where(masked, 0.0, logprobs).sum()
    if entropy is not None:
        total = total + torch.where(masked, 0.0, entropy).sum()
    total.backward()
    assert (hidden.grad[masked] == 0).all()
    doubles = [x.detach().double().requires_grad_() for x in (hidden[~masked], weight, bias)]
    reference, reference_entropy = exact(*doubles, targets[~masked], 1.0)
    expected = reference.sum() + (reference_entropy.sum() if with_entropy else 0.0)
    expected.backward()
    assert_close(hidden.grad[~masked], doubles[0].grad, 3e-6)
    assert_close(weight.grad, doubles[1].grad, 3e-6)
    assert_close(bias.grad, doubles[2].grad, 3e-6)


def test_a_ruled_out_token_adds_nothing():
    """A bias of -inf: probability 0, entropy's p log p is 0 and no gradient is NaN."""
    hidden, weight, bias, targets = inputs()
    bias[10], targets[targets == 10] = -math.inf, 0
    tensors = [x.requires_grad_() for x in (hidden, weight, bias)]
    logprobs, entropy = linear_logprobs(*tensors, targets, 1.0, True)
    fewer = [x.detach().double().requires_grad_() for x in (hidden, weight[:10], bias[:10])]
    expected = exact(*fewer, targets, 1.0)
    assert_close(logprobs, expected[0], 2e-6)
    assert_close(entropy, expected[1], 2e-6)
    (logprobs.sum() + entropy.sum()).backward()
    (expected[0].sum() + expected[1].sum()).backward()
    assert_close(hidden.grad, fewer[0].grad, 3e-6)
    assert_close(weight.grad[:10], fewer[1].grad, 3e-6)
    assert (weight.grad[10] == 0).all()
    assert bias.grad[10] == 0


@pytest.mark.parametrize("with_entropy", [False, True])
def test_no_rows_give_gradients_of_zero(with_entropy):
    """A rank without rows takes part in every backward pass: each weight needs a gradient."""
    hidden, weight, bias, targets = inputs(0)
    tensors = [x.requires_grad_() for x in (hidden, weight, bias)]
    logprobs, entropy = linear_logprobs(*tensors, targets, 1.0, with_entropy)
    assert logprobs.shape == (0,)
    (logprobs.sum() + (entropy.sum() if entropy is not None else 0.0)).backward()
    assert hidden.grad.shape == (0, D)
    assert (weight.grad == 0).all()
    assert (bias.grad == 0).all()


def test_large_logits_do_not_overflow():
    hidden, weight = torch.tensor([[1000.0], [-1000.0]]), torch.tensor([[1.0], [1.0], [-1.0]])
    logprobs, entropy = linear_logprobs(hidden, weight, None, torch.tensor([0, 2]), 1.0, True)
    # fp32 logits of 1000 have steps of 6e-5.
    assert logprobs.tolist() == pytest.approx([-math.log(2), 0.0], abs=1e-4)
    assert entropy.tolist() == pytest.approx([math.log(2), 0.0], abs=1e-3)


def test_a_negative_temperature_is_refused():
    with pytest.raises(AssertionError, match="negative"):
        linear_logprobs(*inputs(), temperature=-1.0)


class _LargestResult(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize("with_entropy", [False, True])
def test_no_tensor_of_positions_times_vocabulary(chunks, with_entropy):
    """Forward and backward: 4 rows a chunk of 400, where the weight is smaller than 8 rows."""
    rows, width, vocabulary = 400, 4, 1000
    chunks(4 * vocabulary)
    hidden = torch.randn(rows, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=True)
    targets = torch.zeros(rows, dtype=torch.int64)
    saved = []
    with (
        _LargestResult() as seen,
        torch.autograd.graph.saved_tensors_hooks(
            lambda x: saved.append(x.numel()) or x, lambda x: x
        ),
    ):
        logprobs, entropy = linear_logprobs(hidden, weight, None, targets, 1.0, with_entropy)
        (logprobs.sum() + (entropy.sum() if entropy is not None else 0.0)).backward()
    assert seen.elements == 4 * vocabulary
    assert max(saved) == weight.numel()


@pytest.mark.parametrize("rows_per_chunk", [2, 100])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_several_targets_a_position(chunks, rows_per_chunk, with_entropy):
    """Equal ones too; a position whose targets have no gradient may have infinite logits."""
    chunks(rows_per_chunk * V)
    hidden, weight, bias, first = inputs()
    targets = torch.stack([first, torch.arange(M) % V, first], dim=1)
    tensors = [x.requires_grad_() for x in (hidden, weight, bias)]
    doubles = [x.detach().double().requires_grad_() for x in tensors]
    upstream, other = torch.linspace(-1, 2, 3 * M).view(M, 3), torch.linspace(3, -1, M)

    def expected():
        log_probs = ((doubles[0] @ doubles[1].T + doubles[2]) / 0.7).log_softmax(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        return log_probs.gather(1, targets), entropy if with_entropy else None

    def actual():
        return linear_logprobs(*tensors, targets, 0.7, with_entropy)

    assert_close(actual()[0], expected()[0], 2e-6)
    pairs = [gradients(f, x, upstream, other) for f, x in ((actual, tensors), (expected, doubles))]
    for value, reference in zip(*pairs, strict=True):
        assert_close(value, reference, 3e-6)
    logits = (hidden @ weight.T + bias).detach()[None]
    for whole in (targets, targets[:, 0]):
        ours = token_logprobs(logits.requires_grad_(), whole[None], 0.7)
        plain = (logits / 0.7).log_softmax(-1)[0].gather(1, whole.view(M, -1)).view_as(whole)
        assert_close(ours[0], plain, 2e-6)
        scale = upstream.view(M, 3) if whole.dim() == 2 else upstream[:, 0]
        got, reference = (torch.autograd.grad((x * scale).sum(), logits)[0] for x in (ours, plain))
        assert_close(got, reference, 3e-6)


def test_likeliest_ids(chunks):
    chunks(3 * V)
    hidden, weight, bias, _ = inputs()
    logits = (hidden.double() @ weight.double().T + bias).numpy()
    expected = [sorted(range(9), key=lambda i, row=row: -row[i])[:4] for row in logits]
    assert linear_top_ids(hidden, weight, bias, 4, 9).tolist() == expected
    assert linear_top_ids(hidden, weight, bias, 40, 9).shape == (M, 9)
