"""Attention over packed rows by torch's FlashAttention on CUDA, in 16 bits.

One call for all pieces, one for the answers and prefixes of all groups.
"""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

import dschat.distributed as dist
from dschat.models.packing.kernels import Grads, Output, Saved, join
from dschat.models.packing.segments import Lengths, Segments


class VarlenKernel:
    """Takes and returns what `dschat.models.packing.kernels.SegmentKernel` does. With ``window``
    queries attend to keys fewer than so many positions back; of segments without prefixes.
    """

    def __init__(self, window: int | None = None) -> None:
        # The key of the query itself counts in ours, not in FlashAttention's.
        self._window = None if window is None else window - 1

    @staticmethod
    def supports(query: Tensor) -> bool:
        """Whether FlashAttention takes heads of this dtype and size, on this device: a GPU, Ampere
        or later.
        """
        fits = query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] <= 256
        on_gpu = query.device.type == "cuda"
        return on_gpu and fits and torch.cuda.get_device_capability(query.device) >= (8, 0)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> Output:
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))  # (N, H, D)
        pieces, *shared = segments.table
        output, logsumexp = _forward(q, k, v, pieces, True, scale, self._window)  # (H, N)
        for part in shared:
            queries, keys = part.places
            other, other_logsumexp = _forward(*(q[queries], k[keys], v[keys]), part, False, scale)
            joined, total = join(output[queries], logsumexp.T[queries], other, other_logsumexp.T)
            output[queries] = joined
            logsumexp[:, queries] = total.T
        return output.transpose(0, 1)[None], logsumexp[None]

    def backward(self, grad: Tensor, saved: Saved, segments: Segments, scale: float) -> Grads:
        grad, q, k, v, output = (x[0].transpose(0, 1) for x in (grad, *saved[:4]))
        logsumexp = saved.logsumexp[0]
        whole = Saved(q, k, v, output, logsumexp)
        pieces, *shared = segments.table
        grads = _backward(grad, whole, pieces, True, scale, self._window)
        for part in shared:
            queries, keys = part.places
            of_answers = Saved(q[queries], k[keys], v[keys], output[queries], logsumexp[:, queries])
            found = _backward(grad[queries], of_answers, part, False, scale)
            for total, values, places in zip(grads, found, (queries, keys, keys), strict=True):
                total[places] += values
        grad_q, grad_k, grad_v = (x.transpose(0, 1)[None] for x in grads)
        return grad_q, grad_k, grad_v


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Lengths,
    is_causal: bool,
    scale: float,
    window: int | None = None,
) -> Output:
    output, logsumexp, *_ = torch.ops.aten._flash_attention_forward(
        *(q, k, v, *lengths.arguments, 0.0, is_causal, False),
        scale=scale,
        window_size_left=window,
    )
    return output, logsumexp


def _backward(
    grad: Tensor,
    saved: Saved,
    lengths: Lengths,
    is_causal: bool,
    scale: float,
    window: int | None = None,
) -> Grads:
    """``saved`` has tokens first, as FlashAttention takes them: (N, H, D), and (H, N)."""
    q, k, v, output, logsumexp = saved
    unused = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which is 0
    return torch.ops.aten._flash_attention_backward(
        *(grad.contiguous(), q, k, v, output, logsumexp.contiguous()),
        *lengths.arguments,
        *(0.0, is_causal, unused, unused[:0]),
        scale=scale,
        window_size_left=window,
    )


# -- device copy -----------------------------------------------------------------------------------
#
# Moves a micro-batch to a device in one copy.

T = TypeVar("T")

_ALIGNMENT = 16  # bytes: kernels read as many at once


def to_device(batch: T, device: str | torch.device) -> T:
    """``batch``, a dataclass, with all tensors of it and of dataclasses in it on ``device``.

    Tensors in host memory go to another device as parts of one pinned buffer: one copy, queued
    behind the device's work, for which the host does not wait.
    """
    target = torch.device(device)
    tensors: list[Tensor] = []
    _mapped(batch, tensors.append)
    if all(_is_on(tensor, target) for tensor in tensors):
        return batch
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return _mapped(batch, lambda tensor: tensor.to(target))
    starts, size = [], 0
    for tensor in tensors:
        starts.append(size)
        size += -(-tensor.numel() * tensor.itemsize // _ALIGNMENT) * _ALIGNMENT
    buffer = torch.empty(size, dtype=torch.uint8, pin_memory=dist.has_gpu())
    for tensor, start in zip(tensors, starts, strict=True):
        _part(buffer, start, tensor).copy_(tensor)
    moved = buffer.to(target, non_blocking=True)
    parts = (_part(moved, start, x) for x, start in zip(tensors, starts, strict=True))
    return _mapped(batch, lambda _: next(parts))


def _is_on(tensor: Tensor, device: torch.device) -> bool:
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)


def _mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """``value`` with every tensor changed, in the order of the fields."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) is tuple:
        return tuple(_mapped(part, change) for part in value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    return replace(
        value, **{f.name: _mapped(getattr(value, f.name), change) for f in fields(value)}
    )


def _part(buffer: Tensor, start: int, like: Tensor) -> Tensor:
    """The bytes of ``buffer`` from ``start`` on, in the dtype and shape of ``like``."""
    part = buffer[start : start + like.numel() * like.itemsize]
    return part.view(like.dtype).view(like.shape)
