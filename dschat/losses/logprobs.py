"""Computes per-token log-probs and entropies, from logits or from hidden states.

From logits, the vocabulary is read in chunks, so that no fp32 copy of (B, T, V) is made. From
hidden states, the language-model head and the log-softmax run over chunks of the positions, and
again in the backward pass, so that memory does not grow with positions x vocabulary. Conventions:
see `dschat.losses`.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# fp32 elements of one temporary over the vocabulary (16 MiB). On two CPU cores 2^18 to 2^22 are
# equally fast, as fast as one log_softmax; a GPU needs few launches, hence the largest.
_CHUNK_ELEMENTS = 1 << 22


def _chunks(logits: Tensor) -> Iterator[tuple[slice, slice]]:
    """Index pairs (batch, time) that split (B, T, V) into parts of at most ``_CHUNK_ELEMENTS``.

    Slices, not a flattened view: ``logits[:, :-1]`` cannot be flattened without a copy.
    """
    num_rows, seq_len, vocab = logits.shape
    rows = max(1, _CHUNK_ELEMENTS // max(1, seq_len * vocab))
    steps = min(max(1, seq_len), max(1, _CHUNK_ELEMENTS // max(1, vocab)))
    for b in range(0, num_rows, rows):
        for t in range(0, seq_len, steps):
            yield slice(b, b + rows), slice(t, t + steps)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """fp32 logits / T. NOTE: may return ``logits`` itself; never write into the result."""
    logits = logits.float()
    return logits if temperature == 1.0 else logits / temperature


def checked_temperature(temperature: float) -> float:
    """T of the log-probs: greedy decoding (temperature 0) is scored at T = 1."""
    assert temperature >= 0, f"temperature {temperature} is negative"
    return float(temperature) or 1.0


class _TokenLogprobs(torch.autograd.Function):
    """Gathered log-softmax that saves the logits unchanged plus one fp32 number per token.

    Plain autograd would save an fp32 (B, T, V) for the backward pass: twice bf16 logits.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target_ids: Tensor, temperature: float) -> Tensor:
        logsumexp = torch.empty(logits.shape[:-1], dtype=torch.float32, device=logits.device)
        for chunk in _chunks(logits):
            logsumexp[chunk] = torch.logsumexp(_scaled(logits[chunk], temperature), dim=-1)
        picked = logits.gather(-1, target_ids)
        ctx.save_for_backward(logits, target_ids, logsumexp)
        ctx.temperature = temperature
        return _scaled(picked, temperature) - logsumexp.unsqueeze(-1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        logits, target_ids, logsumexp = ctx.saved_tensors
        scale = grad_output.float() / ctx.temperature  # (B, T, K)
        every = scale.sum(-1, keepdim=True)
        unused = (scale == 0).all(-1, keepdim=True)
        grad = torch.empty_like(logits)
        for chunk in _chunks(logits):
            log_p = _scaled(logits[chunk], ctx.temperature) - logsumexp[chunk].unsqueeze(-1)
            part = log_p.exp_().mul_(-every[chunk])
            part.scatter_add_(-1, target_ids[chunk], scale[chunk])
            # A masked token has gradient 0 but its logits may be NaN, and 0 * NaN is NaN.
            grad[chunk] = part.masked_fill_(unused[chunk], 0.0)
        return grad, None, None


def token_logprobs(logits: Tensor, target_ids: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-prob of each target under the distribution at its own position.

    ``log_softmax(logits / T)[target]`` in fp32, of the raw logits: before any truncation or
    penalty. The caller aligns the two: ``logits[b, t]`` predicts ``target_ids[b, t]``.
    Differentiable once. The logits must not change before the backward pass; the gradient has
    their dtype.

    Args:
        logits: (B, T, V), any float dtype.
        target_ids: (B, T) or (B, T, K) int64, all in [0, V), masked ones too.
        temperature: T; 0 (greedy) counts as 1.

    Returns:
        fp32 in the shape of ``target_ids``.
    """
    ids = target_ids if target_ids.dim() == 3 else target_ids.unsqueeze(-1)
    return _TokenLogprobs.apply(logits, ids, checked_temperature(temperature)).view_as(target_ids)


@torch.no_grad()
def entropy_from_logits(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """`token_entropy` without gradient, for metrics."""
    return _entropy(logits, checked_temperature(temperature))


def token_entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Entropy in nats of ``softmax(logits / T)``: (B, T, V) any float -> (B, T) fp32.

    A logit of -inf is a token of probability 0: it adds nothing and gets no gradient. T = 0
    (greedy) counts as 1. Differentiable once; saves the logits and one fp32 number per token.
    """
    return _TokenEntropy.apply(logits, checked_temperature(temperature))


def _entropy(logits: Tensor, temperature: float) -> Tensor:
    entropy = torch.empty(logits.shape[:-1], dtype=torch.float32, device=logits.device)
    for chunk in _chunks(logits):
        probs = torch.softmax(_scaled(logits[chunk], temperature), dim=-1)
        entropy[chunk] = torch.special.entr(probs).sum(dim=-1)
    return entropy


class _TokenEntropy(torch.autograd.Function):
    """dH/dlogit_j = -p_j (log p_j + H) / T, recomputed chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, temperature: float) -> Tensor:
        entropy = _entropy(logits, temperature)
        ctx.save_for_backward(logits, entropy)
        ctx.temperature = temperature
        return entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        logits, entropy = ctx.saved_tensors
        scale = (grad_output.float() / ctx.temperature).unsqueeze(-1)  # (B, T, 1)
        grad = torch.empty_like(logits)
        for chunk in _chunks(logits):
            probs = torch.softmax(_scaled(logits[chunk], ctx.temperature), dim=-1)
            # entr(p) = -p log p is 0 at p = 0, where log p is not finite.
            part = torch.special.entr(probs).sub_(probs.mul_(entropy[chunk].unsqueeze(-1)))
            part.mul_(scale[chunk])
            grad[chunk] = part.masked_fill_(scale[chunk] == 0, 0.0)
        return grad, None


# Elements of the logits of one chunk (64 MiB in fp32), and at least so many positions: every chunk
# reads the head and adds to its gradient. One chunk's logits are kept for the backward pass:
# recomputing them would cost a third of the head's arithmetic.
_HEAD_CHUNK_ELEMENTS = 1 << 24
_CHUNK_ROWS = 256

Product = Callable[..., Tensor]  # (x, weight, bias or None) -> x weight^T + bias


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target_ids: Tensor,
    temperature: float = 1.0,
    with_entropy: bool = False,
    product: Product = F.linear,
) -> tuple[Tensor, Tensor | None]:
    """`token_logprobs`, and `token_entropy` if asked for, of ``hidden @ weight.T + bias``.

    Differentiable once, in ``hidden``, ``weight`` and ``bias``.

    Args:
        hidden: (M, D), any float dtype.
        weight: (V, D) and bias: (V,), the head.
        target_ids: (M,) or, for several a position, (M, K) int64, all in [0, V).
        temperature: T; 0 (greedy) counts as 1.
        product: computes all products with the head, those of the gradients too.

    Returns:
        fp32 log-probs in the shape of ``target_ids``, and (M,) fp32 entropies in nats or None.
    """
    temperature = checked_temperature(temperature)
    ids = target_ids if target_ids.dim() == 2 else target_ids.unsqueeze(1)
    logprobs, entropy = _LinearLogprobs.apply(
        hidden, weight, bias, ids, temperature, with_entropy, product
    )
    return logprobs.view_as(target_ids), entropy if with_entropy else None


@torch.no_grad()
def linear_top_ids(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    top_k: int,
    num_ids: int,
    product: Product = F.linear,
) -> Tensor:
    """The ``top_k`` likeliest of the first ``num_ids`` ids at each position: (M, K) int64.

    Fewer where there are fewer ids. Arguments as in `linear_logprobs`.
    """
    top_k = min(top_k, num_ids)
    ids = torch.empty(len(hidden), top_k, dtype=torch.int64, device=hidden.device)
    for rows in _row_chunks(len(hidden), len(weight)):
        logits = product(hidden[rows], weight, bias)
        ids[rows] = logits[:, :num_ids].topk(top_k).indices
    return ids


def _row_chunks(num_rows: int, vocabulary: int) -> Iterator[slice]:
    size = max(_CHUNK_ROWS, _HEAD_CHUNK_ELEMENTS // vocabulary)
    for start in range(0, num_rows, size):
        yield slice(start, start + size)


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target_ids: Tensor,
        temperature: float,
        with_entropy: bool,
        product: Product,
    ) -> tuple[Tensor, Tensor]:
        num_rows, vocabulary = len(hidden), len(weight)
        logsumexp = hidden.new_empty(num_rows, dtype=torch.float32)
        picked = hidden.new_empty(target_ids.shape, dtype=torch.float32)  # (M, K)
        entropy = torch.empty_like(logsumexp if with_entropy else logsumexp[:0])
        logits = None
        for rows in _row_chunks(num_rows, vocabulary):
            logits = product(hidden[rows], weight, bias)
            scaled = _scaled(logits, temperature)
            logsumexp[rows] = scaled.logsumexp(-1)
            picked[rows] = scaled.gather(-1, target_ids[rows])
            if with_entropy:
                probs = (scaled - logsumexp[rows].unsqueeze(-1)).exp_()
                entropy[rows] = torch.special.entr(probs).sum(-1)
        kept = logits if logits is not None and len(logits) == num_rows else None
        ctx.save_for_backward(hidden, weight, bias, target_ids, logsumexp, entropy, kept)
        ctx.temperature, ctx.with_entropy, ctx.product = temperature, with_entropy, product
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return picked - logsumexp.unsqueeze(-1), entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target_ids, logsumexp, entropy, kept = ctx.saved_tensors
        num_rows, vocabulary = len(hidden), len(weight)
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if of_hidden else None
        # 16-bit sums over many chunks would round.
        sum_dtype = weight.dtype if kept is not None else torch.float32
        grad_weight = torch.zeros_like(weight, dtype=sum_dtype) if of_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if of_bias else None
        for rows in _row_chunks(num_rows, vocabulary):
            logits = ctx.product(hidden[rows], weight, bias) if kept is None else kept
            scale = grad[rows] / ctx.temperature  # (m, K)
            unused, entropies = (scale == 0).all(-1, keepdim=True), None
            if ctx.with_entropy:
                entropy_scale = (grad_entropy[rows] / ctx.temperature).unsqueeze(-1)
                unused &= entropy_scale == 0
                entropies = entropy[rows].unsqueeze(-1), entropy_scale
            probs = _scaled(logits, ctx.temperature) - logsumexp[rows].unsqueeze(-1)
            logits = None  # NOTE: a chunk's temporaries are the peak of memory
            part = _grad_logits(probs.exp_(), scale, target_ids[rows], entropies)
            probs = None
            # A masked position has gradient 0 but its logits may be NaN, and 0 * NaN is NaN: in
            # the sum over positions, too.
            part = part.masked_fill_(unused, 0.0).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = ctx.product(part, weight.t(), None)
            if grad_weight is not None:
                used = hidden[rows].masked_fill(unused, 0.0)
                grad_weight += ctx.product(part.t(), used.t(), None)
            if grad_bias is not None:
                grad_bias += part.sum(0, dtype=torch.float32)
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        if grad_bias is not None:
            grad_bias = grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _grad_logits(
    probs: Tensor, scale: Tensor, target_ids: Tensor, entropies: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Gradient of the logits (m, V), perhaps in the memory of ``probs``.

    d log p_t / dlogit_j = [j = t] - p_j, times ``scale`` (m, K) of each target t;
    dH/dlogit_j = -p_j (log p_j + H), where ``entropies`` are H and its scale, each (m, 1).
    """
    every = scale.sum(-1, keepdim=True)
    if entropies is None:
        part = probs.mul_(-every)
    else:
        entropy, entropy_scale = entropies
        # entr(p) = -p log p is 0 at p = 0, where log p is not finite.
        part = torch.special.entr(probs).addcmul_(probs, entropy, value=-1.0)
        part.mul_(entropy_scale).sub_(probs.mul_(every))
    return part.scatter_add_(-1, target_ids, scale)
