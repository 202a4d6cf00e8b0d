"""Attention kernels for packed rows: forward and backward over segments, with log-sum-exps.

All take (1, H, N, D) queries, keys and values of equal numbers of heads. Keys of a segment are
those of the same segment up to the query (causal), and all of the segment's prefix.
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from dschat.models.packing.segments import Segments

Grads = tuple[Tensor, Tensor, Tensor]


class Kernel(Protocol):
    """Attention over segments on one kind of device."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Output (1, H, N, D) in the dtype of ``q``; log-sum-exp of the scores (1, H, N) fp32."""
        ...

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        output: Tensor,
        logsumexp: Tensor,
        segments: Segments,
        scale: float,
    ) -> Grads:
        """Gradients of ``q``, ``k`` and ``v``."""
        ...


def join(
    output: Tensor, logsumexp: Tensor, other: Tensor, other_logsumexp: Tensor
) -> tuple[Tensor, Tensor]:
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
        backward: (grad, q, k, v, output, log-sum-exp, is_causal, scale) -> gradients.
    """

    def __init__(
        self, forward: Callable[..., tuple[Tensor, Tensor]], backward: Callable[..., Grads]
    ) -> None:
        self._forward, self._backward = forward, backward

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float
    ) -> tuple[Tensor, Tensor]:
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

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        output: Tensor,
        logsumexp: Tensor,
        segments: Segments,
        scale: float,
    ) -> Grads:
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        run = partial(_over, self._backward, grad, q, k, v, output, logsumexp, scale)
        for start, end in segments.pieces:
            for total, part in zip(grads, run((start, end), (start, end), True), strict=True):
                total[:, :, start:end] = part
        for prefix, answers in segments.shared:
            parts = run(answers, prefix, False)
            for total, part, (start, end) in zip(
                grads, parts, (answers, prefix, prefix), strict=True
            ):
                total[:, :, start:end] += part
        return grads


def _over(
    backward: Callable[..., Grads],
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    scale: float,
    queries: tuple[int, int],
    keys: tuple[int, int],
    is_causal: bool,
) -> Grads:
    """``backward`` of the queries and keys in these bounds."""
    grad, q, output, logsumexp = (x[:, :, slice(*queries)] for x in (grad, q, output, logsumexp))
    k, v = (x[:, :, slice(*keys)] for x in (k, v))
    return backward(grad, q, k, v, output, logsumexp, is_causal, scale)


CPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _cpu_forward(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, is_causal, scale=scale
    )


def _cpu_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
    scale: float,
) -> Grads:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, output, logsumexp, 0.0, is_causal, scale=scale
    )


def _scores(q: Tensor, k: Tensor, is_causal: bool, scale: float) -> Tensor:
    scores = q.float() @ k.float().transpose(-1, -2) * scale
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    return scores


def _plain_forward(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """In plain torch, in fp32, for devices and dtypes without a kernel of their own."""
    scores = _scores(q, k, is_causal, scale)
    return (scores.softmax(-1) @ v.float()).to(q.dtype), scores.logsumexp(-1)


def _plain_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
    scale: float,
) -> Grads:
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

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float
    ) -> tuple[Tensor, Tensor]:
        num_rows, num_heads, seq_len, _ = q.shape
        # Heads of one token stand together: merging them copies nothing.
        output = q.new_empty(num_rows, seq_len, num_heads, v.shape[-1]).transpose(1, 2)
        return output, q.new_empty(q.shape[:3], dtype=torch.float32)

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        output: Tensor,
        logsumexp: Tensor,
        segments: Segments,
        scale: float,
    ) -> Grads:
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


CPU = SegmentKernel(_cpu_forward, _cpu_backward)
PLAIN = SegmentKernel(_plain_forward, _plain_backward)
META = MetaKernel()
