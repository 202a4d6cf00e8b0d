"""Computes per-token log-probs and entropies, from hidden states or from logits.

The language-model head and the log-softmax run over chunks of the positions, and again in the
backward pass, so that memory does not grow with positions x vocabulary, and no fp32 copy of given
logits is made. Conventions: see `dschat.losses`.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """fp32 logits / T. NOTE: may return ``logits`` itself; never write into the result."""
    logits = logits.float()
    return logits if temperature == 1.0 else logits / temperature


# Elements of the logits of one chunk (64 MiB in fp32), and at least so many positions: every chunk
# reads the head and adds to its gradient. One chunk's logits are kept for the backward pass:
# recomputing them would cost a third of the head's arithmetic.
_HEAD_CHUNK_ELEMENTS = 1 << 24
_CHUNK_ROWS = 256

Product = Callable[..., Tensor]  # (x, weight, bias or None) -> x weight^T + bias


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    target_ids: Tensor,
    temperature: float = 1.0,
    with_entropy: bool = False,
    product: Product = F.linear,
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of each target, and the entropy if asked for, at every position of
    ``hidden @ weight.T + bias``.

    ``log_softmax(logits / T)[target]`` in fp32, of the raw logits: before any truncation or
    penalty. A logit of -inf is a token of probability 0: it adds nothing to the entropy and gets no
    gradient. Differentiable once, in ``hidden``, ``weight`` and ``bias``, with gradients of their
    dtypes; logits that are given must not change before the backward pass.

    Args:
        hidden: (M, D), any float dtype.
        weight: (V, D) and bias: (V,), the head. None: ``hidden`` are the logits, (M, V).
        target_ids: (M,) or, for several a position, (M, K) int64, all in [0, V), masked ones too.
        temperature: T; 0 (greedy) counts as 1.
        product: computes all products with the head, the gradients' too.

    Returns:
        fp32 log-probs in the shape of ``target_ids``, and (M,) fp32 entropies in nats or None.
    """
    assert temperature >= 0, f"temperature {temperature} is negative"
    temperature = float(temperature) or 1.0
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
    for rows in _row_chunks(hidden, weight):
        logits = product(hidden[rows], weight, bias)
        ids[rows] = logits[:, :num_ids].topk(top_k).indices
    return ids


def _row_chunks(hidden: Tensor, weight: Tensor | None) -> Iterator[slice]:
    vocabulary, least = (hidden.shape[1], 1) if weight is None else (len(weight), _CHUNK_ROWS)
    size = max(least, _HEAD_CHUNK_ELEMENTS // vocabulary)
    for start in range(0, len(hidden), size):
        yield slice(start, start + size)


def _logits(hidden: Tensor, weight: Tensor | None, bias: Tensor | None, product: Product) -> Tensor:
    return hidden if weight is None else product(hidden, weight, bias)


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        target_ids: Tensor,
        temperature: float,
        with_entropy: bool,
        product: Product,
    ) -> tuple[Tensor, Tensor]:
        logsumexp = hidden.new_empty(len(hidden), dtype=torch.float32)
        picked = hidden.new_empty(target_ids.shape, dtype=torch.float32)  # (M, K)
        entropy = torch.empty_like(logsumexp if with_entropy else logsumexp[:0])
        logits = None
        for rows in _row_chunks(hidden, weight):
            logits = _logits(hidden[rows], weight, bias, product)
            scaled = _scaled(logits, temperature)
            logsumexp[rows] = scaled.logsumexp(-1)
            picked[rows] = scaled.gather(-1, target_ids[rows])
            if with_entropy:
                probs = (scaled - logsumexp[rows].unsqueeze(-1)).exp_()
                entropy[rows] = torch.special.entr(probs).sum(-1)
        is_whole = weight is not None and logits is not None and len(logits) == len(hidden)
        kept = logits if is_whole else None
        ctx.save_for_backward(hidden, weight, bias, target_ids, logsumexp, entropy, kept)
        ctx.temperature, ctx.with_entropy, ctx.product = temperature, with_entropy, product
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return picked - logsumexp.unsqueeze(-1), entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target_ids, logsumexp, entropy, kept = ctx.saved_tensors
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if of_hidden else None
        # 16-bit sums over many chunks would round.
        sum_dtype = weight.dtype if kept is not None else torch.float32
        grad_weight = torch.zeros_like(weight, dtype=sum_dtype) if of_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if of_bias else None
        for rows in _row_chunks(hidden, weight):
            logits = kept
            if kept is None:
                logits = _logits(hidden[rows], weight, bias, ctx.product)
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
                grad_hidden[rows] = part if weight is None else ctx.product(part, weight.t(), None)
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
