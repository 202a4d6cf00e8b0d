"""Attention over packed rows by torch's FlashAttention on CUDA, in 16 bits.

One call for all pieces, one for the answers and prefixes of all groups.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dschat.models.packing.kernels import Grads, join
from dschat.models.packing.rows import Segments


class _Bounds(NamedTuple):
    """Cumulative lengths (S + 1,) int32 on the device, and the longest on the host."""

    queries: Tensor
    keys: Tensor
    max_queries: int
    max_keys: int


class _Shared(NamedTuple):
    """Groups that have answers: which of the stream's tokens are queries and keys of them."""

    bounds: _Bounds
    queries: Tensor  # (Q,) int64
    keys: Tensor  # (K,) int64


def _cumulative(lengths: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32, non_blocking=True)


def _pieces(segments: Segments, device: torch.device) -> _Bounds:
    lengths = [end - start for start, end in segments.pieces]
    bounds = _cumulative(lengths, device)
    return _Bounds(bounds, bounds, max(lengths), max(lengths))


def _shared(segments: Segments, device: torch.device) -> _Shared | None:
    if not segments.shared:
        return None
    prefixes, answers = zip(*segments.shared, strict=True)
    num_queries, num_keys = ([b - a for a, b in bounds] for bounds in (answers, prefixes))
    queries, keys = (
        torch.cat([torch.arange(a, b) for a, b in bounds]).to(device, non_blocking=True)
        for bounds in (answers, prefixes)
    )
    bounds = _Bounds(
        _cumulative(num_queries, device),
        _cumulative(num_keys, device),
        max(num_queries),
        max(num_keys),
    )
    return _Shared(bounds, queries, keys)


class _Table(NamedTuple):
    pieces: _Bounds
    shared: _Shared | None


def _table(segments: Segments, device: torch.device) -> _Table:
    """The segments on the device: made once for all layers and for the backward pass."""
    tables: dict[torch.device, _Table] = segments.__dict__.setdefault("_varlen", {})
    if device not in tables:
        tables[device] = _Table(_pieces(segments, device), _shared(segments, device))
    return tables[device]


class VarlenKernel:
    """A `dschat.models.packing.kernels.Kernel`."""

    @staticmethod
    def supports(query: Tensor) -> bool:
        """Whether FlashAttention takes heads of this dtype and size, on this GPU (Ampere or
        later).
        """
        fits = query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] <= 256
        return fits and torch.cuda.get_device_capability(query.device) >= (8, 0)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))  # (N, H, D)
        pieces, shared = _table(segments, q.device)
        output, logsumexp = _forward(q, k, v, pieces, True, scale)  # (N, H, D), (H, N)
        if shared is not None:
            bounds, queries, keys = shared
            other, other_logsumexp = _forward(q[queries], k[keys], v[keys], bounds, False, scale)
            joined, total = join(output[queries], logsumexp.T[queries], other, other_logsumexp.T)
            output[queries] = joined
            logsumexp[:, queries] = total.T
        return output.transpose(0, 1)[None], logsumexp[None]

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
        grad, q, k, v, output = (x[0].transpose(0, 1) for x in (grad, q, k, v, output))
        pieces, shared = _table(segments, q.device)
        grads = _backward(grad, q, k, v, output, logsumexp[0], pieces, True, scale)
        if shared is not None:
            bounds, queries, keys = shared
            parts = _backward(
                grad[queries],
                q[queries],
                k[keys],
                v[keys],
                output[queries],
                logsumexp[0][:, queries],
                bounds,
                False,
                scale,
            )
            for total, part, rows in zip(grads, parts, (queries, keys, keys), strict=True):
                total[rows] += part
        grad_q, grad_k, grad_v = (x.transpose(0, 1)[None] for x in grads)
        return grad_q, grad_k, grad_v


def _forward(
    q: Tensor, k: Tensor, v: Tensor, bounds: _Bounds, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    output, logsumexp, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, *bounds, 0.0, is_causal, False, scale=scale
    )
    return output, logsumexp


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    bounds: _Bounds,
    is_causal: bool,
    scale: float,
) -> Grads:
    unused = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which is 0
    return torch.ops.aten._flash_attention_backward(
        grad.contiguous(),
        q,
        k,
        v,
        output,
        logsumexp.contiguous(),
        *bounds,
        0.0,
        is_causal,
        unused,
        unused[:0],
        scale=scale,
    )
