"""Computes per-token log-probs and entropies from logits.

The vocabulary is read in chunks, so that no fp32 copy of (B, T, V) is made. Conventions: see
`dschat.losses`.
"""

from collections.abc import Iterator
from typing import Any

import torch
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
