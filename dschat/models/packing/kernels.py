"""Attention kernels for packed rows: forward and backward over segments, with log-sum-exps.

All take (1, H, N, D) queries, keys and values of equal numbers of heads. Keys of a segment are
those of the same segment up to the query (causal), and all of the segment's prefix.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dschat.models.packing.segments import Segments

Output = tuple[Tensor, Tensor]  # (1, H, N, D), and the log-sum-exp of the scores, (1, H, N) fp32
Grads = tuple[Tensor, Tensor, Tensor]  # of q, k and v


class Saved(NamedTuple):
    """What a forward saves for its backward."""

    q: Tensor  # (1, H, N, D), as `k`, `v` and `output`
    k: Tensor
    v: Tensor
    output: Tensor
    logsumexp: Tensor  # (1, H, N) fp32

    def part(self, queries: slice, keys: slice) -> "Saved":
        """The tokens ``queries`` and ``keys`` alone."""
        q, output, logsumexp = (x[:, :, queries] for x in (self.q, self.output, self.logsumexp))
        return Saved(q, self.k[:, :, keys], self.v[:, :, keys], output, logsumexp)


class Kernel(Protocol):
    """Attention over segments on one kind of device."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> Output:
        """Output (1, H, N, D) in the dtype of ``q``; log-sum-exp of the scores (1, H, N) fp32."""
        ...

    def backward(self, grad: Tensor, saved: Saved, segments: Segments, scale: float) -> Grads:
        """Gradients of ``q``, ``k`` and ``v``."""
        ...


def join(output: Tensor, logsumexp: Tensor, other: Tensor, other_logsumexp: Tensor) -> Output:
    """Attention over two sets of keys from the attention over each: outputs (..., D) weighed by
    their shares of exp(log-sum-exp), in fp32, and the log-sum-exp (...) of both.
    """
    total = torch.logaddexp(logsumexp, other_logsumexp)
    first, second = (logsumexp - total).exp(), (other_logsumexp - total).exp()
    joined = output.float() * first.unsqueeze(-1) + other.float() * second.unsqueeze(-1)
    return joined.to(output.dtype), total


class SegmentKernel:
    """One call of a dense kernel for every piece, and one for the answers and prefix of a group.

    Args:
        forward: (q, k, v, is_causal, scale) -> output (1, H, Q, D), log-sum-exp (1, H, Q).
        backward: (grad, saved, is_causal, scale) -> gradients.
    """

    def __init__(self, forward: Callable[..., Output], backward: Callable[..., Grads]) -> None:
        self._forward, self._backward = forward, backward

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> Output:
        # Heads of one token stand together, as the projection after attention reads them.
        output = torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format)
        output = output.transpose(1, 2)
        logsumexp = q.new_empty(q.shape[:3], dtype=torch.float32)
        for start, end in segments.pieces:
            piece = (slice(None), slice(None), slice(start, end))
            part = self._forward(q[piece], k[piece], v[piece], True, scale)
            output[piece], logsumexp[piece] = part
        for (first, middle), (_, end) in segments.shared:
            prefix = (slice(None), slice(None), slice(first, middle))
            answers = (slice(None), slice(None), slice(middle, end))
            other = self._forward(q[answers], k[prefix], v[prefix], False, scale)
            output[answers], logsumexp[answers] = join(output[answers], logsumexp[answers], *other)
        return output, logsumexp

    def backward(self, grad: Tensor, saved: Saved, segments: Segments, scale: float) -> Grads:
        grads = _empty_grads(saved)
        for start, end in segments.pieces:
            piece = slice(start, end)
            own = self._backward(grad[:, :, piece], saved.part(piece, piece), True, scale)
            for total, part in zip(grads, own, strict=True):
                total[:, :, piece] = part
        for bounds in segments.shared:
            prefix, answers = (slice(*each) for each in bounds)
            shared = saved.part(answers, prefix)
            more = self._backward(grad[:, :, answers], shared, False, scale)
            for total, part, where in zip(grads, more, (answers, prefix, prefix), strict=True):
                total[:, :, where] += part
        return grads


def _empty_grads(saved: Saved) -> Grads:
    return torch.empty_like(saved.q), torch.empty_like(saved.k), torch.empty_like(saved.v)


CPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> Output:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, is_causal, scale=scale
    )


def _cpu_backward(grad: Tensor, saved: Saved, is_causal: bool, scale: float) -> Grads:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, *saved, 0.0, is_causal, scale=scale
    )


def _scores(q: Tensor, k: Tensor, is_causal: bool, scale: float) -> Tensor:
    scores = q.float() @ k.float().transpose(-1, -2) * scale
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    return scores


def _plain_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> Output:
    """In plain torch, in fp32, for devices and dtypes without a kernel of their own."""
    scores = _scores(q, k, is_causal, scale)
    return (scores.softmax(-1) @ v.float()).to(q.dtype), scores.logsumexp(-1)


def _plain_backward(grad: Tensor, saved: Saved, is_causal: bool, scale: float) -> Grads:
    q, k, v, output, logsumexp = saved
    grad, output = grad.float(), output.float()
    probs = (_scores(q, k, is_causal, scale) - logsumexp.unsqueeze(-1)).exp()
    delta = (grad * output).sum(-1, keepdim=True)
    grad_scores = probs * (grad @ v.float().transpose(-1, -2) - delta) * scale
    return (
        (grad_scores @ k.float()).to(q.dtype),
        (grad_scores.transpose(-1, -2) @ q.float()).to(k.dtype),
        (probs.transpose(-1, -2) @ grad).to(v.dtype),
    )


class MetaKernel:
    """Allocates what a fused kernel does, and computes nothing. The rows may be padded ones,
    (B, H, T, D).
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> Output:
        num_rows, num_heads, seq_len, _ = q.shape
        # Heads of one token stand together: merging them copies nothing.
        output = q.new_empty(num_rows, seq_len, num_heads, v.shape[-1]).transpose(1, 2)
        return output, q.new_empty(q.shape[:3], dtype=torch.float32)

    def backward(self, grad: Tensor, saved: Saved, segments: Segments, scale: float) -> Grads:
        return _empty_grads(saved)


CPU = SegmentKernel(_cpu_forward, _cpu_backward)
PLAIN = SegmentKernel(_plain_forward, _plain_backward)
META = MetaKernel()
