"""Moves a micro-batch to a device in one copy."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

import dschat.distributed as dist

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
    if not is_dataclass(value) or isinstance(value, type):
        return value
    return replace(
        value, **{f.name: _mapped(getattr(value, f.name), change) for f in fields(value)}
    )


def _part(buffer: Tensor, start: int, like: Tensor) -> Tensor:
    """The bytes of ``buffer`` from ``start`` on, in the dtype and shape of ``like``."""
    part = buffer[start : start + like.numel() * like.itemsize]
    return part.view(like.dtype).view(like.shape)
