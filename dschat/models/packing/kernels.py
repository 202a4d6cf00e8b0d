"""Attention kernels for packed rows: forward and backward over segments, with log-sum-exps.

All take (1, H, N, D) queries, and (1, K, N, D) keys and values, where K divides H. A query
reads the keys of its own segment up to itself (causal), and of the prefix that the segment reads.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dschat.models.packing.segments import Batch, Segments

Output = tuple[Tensor, Tensor]  # (1, H, N, D), and the log-sum-exp of the scores, (1, H, N) fp32
Grads = tuple[Tensor, Tensor, Tensor]  # of q, k and v


class Scores(NamedTuple):
    """What becomes of the products of queries and keys in a layer."""

    scale: float
    window: int | None = None  # keys that a query attends to; None: all
    softcap: float | None = None  # c: c * tanh(score / c)
    sinks: Tensor | None = None  # (H,): a further score of each head, whose value is zero
    chunk: int | None = None  # keys of the same so many positions; None: all
    dropout: float = 0.0

    @property
    def is_plain(self) -> bool:
        return self.softcap is None and self.sinks is None and self.chunk is None

    def within(self, num_keys: int) -> tuple[int | None, int | None]:
        """Window and chunk, None where they hide none of ``num_keys`` keys."""
        sizes = [size if size and size < num_keys else None for size in (self.window, self.chunk)]
        return sizes[0], sizes[1]

    def first_key(self, query: Any) -> Any:
        """The first key that a query, or queries, at this position attend to, of a window or a
        chunk.
        """
        return query - (query % self.chunk if self.chunk else (self.window or 0) - 1)


class Saved(NamedTuple):
    q: Tensor  # (1, H, N, D), as `output`
    k: Tensor  # (1, K, N, D), as `v`
    v: Tensor
    output: Tensor
    logsumexp: Tensor  # (1, H, N) fp32

    def part(self, batch: Batch) -> "Saved":
        """The tokens of ``batch`` alone."""
        q, output, logsumexp = (
            _take(x, batch.queries) for x in (self.q, self.output, self.logsumexp)
        )
        return Saved(q, _take(self.k, batch.keys), _take(self.v, batch.keys), output, logsumexp)


def join(output: Tensor, logsumexp: Tensor, other: Tensor, other_logsumexp: Tensor) -> Output:
    """Attention over two sets of keys from the attention over each: outputs (..., D) weighed by
    their shares of exp(log-sum-exp), in fp32, and the log-sum-exp (...) of both.
    """
    # NOTE: not torch.logaddexp, which on a CPU rounds by the place in the tensor.
    gap = (logsumexp - other_logsumexp).abs()
    total = torch.maximum(logsumexp, other_logsumexp) + gap.neg().exp().log1p()
    first, second = (logsumexp - total).exp(), (other_logsumexp - total).exp()
    joined = output.float() * first.unsqueeze(-1) + other.float() * second.unsqueeze(-1)
    return joined.to(output.dtype), total


class SegmentKernel:
    """One call of a dense kernel for every batch of pieces, and of answers with their prefixes.

    Args:
        forward: (q, k, v, is_causal, scale) -> output (B, H, Q, D), log-sum-exp (B, H, Q).
        backward: (grad, saved, is_causal, scale) -> gradients.
        most: elements of the queries of short sequences that are taken together; 0: none are.
    """

    def __init__(
        self, forward: Callable[..., Output], backward: Callable[..., Grads], most: int = 0
    ) -> None:
        self._forward, self._backward, self._most = forward, backward, most

    def batches(self, q: Tensor, segments: Segments) -> list[Batch]:
        """What is taken together of ``segments``, for queries (1, H, N, D)."""
        return segments.batches(self._most // (q.shape[1] * q.shape[3]))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> Output:
        # Heads of one token stand together, as the projection after attention reads them.
        output = torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format)
        output = output.transpose(1, 2)
        logsumexp = q.new_empty(q.shape[:3], dtype=torch.float32)
        k, v = per_query_head(k, q), per_query_head(v, q)
        # A segment's own tokens come before its prefix, which is joined to what they left.
        for batch in self.batches(q, segments):
            keys = _take(k, batch.keys), _take(v, batch.keys)
            part = self._forward(_take(q, batch.queries), *keys, batch.is_causal, scale)
            if not batch.is_causal:
                part = join(_take(output, batch.queries), _take(logsumexp, batch.queries), *part)
            for total, values in zip((output, logsumexp), part, strict=True):
                _put(total, batch.queries, values)
        return output, logsumexp

    def backward(self, grad: Tensor, saved: Saved, segments: Segments, scale: float) -> Grads:
        num_groups = saved.k.shape[1]
        saved = saved._replace(k=per_query_head(saved.k, grad), v=per_query_head(saved.v, grad))
        grads = _empty_grads(saved)
        for batch in self.batches(grad, segments):
            # With the joined output and log-sum-exp in `saved`, the kernel's backward of a part of
            # the keys is that part's share of the gradient: shares of queries, and of a prefix's
            # keys, are added up. A segment's own tokens come first, so they need no zeros.
            of_output = _take(grad, batch.queries)
            parts = self._backward(of_output, saved.part(batch), batch.is_causal, scale)
            places = batch.queries, batch.keys, batch.keys
            for total, part, where in zip(grads, parts, places, strict=True):
                _put(total, where, part if batch.is_causal else _take(total, where) + part)
        if num_groups == grad.shape[1]:
            return grads
        of_keys, of_values = (x.unflatten(1, (num_groups, -1)).sum(2) for x in grads[1:])
        return grads[0], of_keys, of_values


def per_query_head(x: Tensor, query: Tensor) -> Tensor:
    """Keys or values (1, K, N, D) for each of the heads of ``query``, (1, H, N, D)."""
    repeats = query.shape[1] // x.shape[1]
    return x if repeats == 1 else x.repeat_interleave(repeats, dim=1)


def _take(x: Tensor, places: slice | Tensor) -> Tensor:
    """Tokens of a stream (1, H, N, ...): of a slice, or of (B, Q) places as (B, H, Q, ...)."""
    if isinstance(places, slice):
        return x[:, :, places]
    taken = x[0].transpose(0, 1).index_select(0, places.flatten())
    return taken.unflatten(0, places.shape).transpose(1, 2)


def _put(x: Tensor, places: slice | Tensor, values: Tensor) -> None:
    """Write what `_take` reads."""
    if isinstance(places, slice):
        x[:, :, places] = values
    else:
        x[0].transpose(0, 1).index_copy_(0, places.flatten(), values.transpose(1, 2).flatten(0, 1))


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


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    """Gemma 2's softcap: within -``softcap`` and ``softcap``."""
    return scores if softcap is None else softcap * (scores / softcap).tanh()


def _scores(
    q: Tensor, k: Tensor, is_causal: bool, scale: float, softcap: float | None = None
) -> Tensor:
    scores = capped(q.float() @ k.float().transpose(-1, -2) * scale, softcap)
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    return scores


def _plain_forward(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float, softcap: float | None = None
) -> Output:
    """In plain torch, in fp32, for devices and dtypes without a kernel of their own."""
    scores = _scores(q, k, is_causal, scale, softcap)
    return (scores.softmax(-1) @ v.float()).to(q.dtype), scores.logsumexp(-1)


def _plain_backward(
    grad: Tensor, saved: Saved, is_causal: bool, scale: float, softcap: float | None = None
) -> Grads:
    q, k, v, output, logsumexp = saved
    grad, output = grad.float(), output.float()
    scores = _scores(q, k, is_causal, scale, softcap)
    probs = (scores - logsumexp.unsqueeze(-1)).exp()
    delta = (grad * output).sum(-1, keepdim=True)
    grad_scores = probs * (grad @ v.float().transpose(-1, -2) - delta) * scale
    if softcap is not None:  # of tanh; masked scores, which are -inf, have no part
        grad_scores *= 1 - (scores.clamp(min=-softcap) / softcap).square()
    return (
        (grad_scores @ k.float()).to(q.dtype),
        (grad_scores.transpose(-1, -2) @ q.float()).to(k.dtype),
        (probs.transpose(-1, -2) @ grad).to(v.dtype),
    )


def plain(softcap: float | None = None) -> SegmentKernel:
    """In plain torch: any device and dtype, with or without a softcap."""
    return SegmentKernel(
        partial(_plain_forward, softcap=softcap), partial(_plain_backward, softcap=softcap)
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


CPU = SegmentKernel(_cpu_forward, _cpu_backward, most=1 << 18)  # 1 MiB stays in a core's cache
PLAIN = plain()
META = MetaKernel()
