"""Copies training state to host memory, so that training continues while the copy is written."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dschat.memory import available_memory

# Fraction of the free memory that a snapshot leaves unused.
_LEFT_FREE = 0.25


def snapshot(state: Any) -> Any:
    """``state`` with every tensor copied to host memory, and every other object copied.

    A tensor under several names (tied weights) is copied once, a view without the rest of its
    storage.
    """
    return _copied(state, {})


def _copied(value: Any, seen: dict[tuple, Tensor]) -> Any:
    if isinstance(value, Tensor):
        key = _identity(value)
        if key not in seen:
            seen[key] = value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        return seen[key]
    if isinstance(value, dict):
        result = type(value)()  # OrderedDict stays one
        result.update((name, _copied(item, seen)) for name, item in value.items())
        return result
    if type(value) in (list, tuple):
        return type(value)(_copied(item, seen) for item in value)
    return copy.deepcopy(value)  # NOTE: loss scalers change in place


def _identity(tensor: Tensor) -> tuple:
    return (
        *(tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset()),
        *(tensor.dtype, tensor.shape, tensor.stride()),
    )


def num_bytes(state: Any) -> int:
    """Bytes that `snapshot` allocates."""
    return sum({_identity(tensor): tensor.nbytes for tensor in _tensors(state)}.values())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif type(value) in (list, tuple):
        for item in value:
            yield from _tensors(item)


def fits(size: int, processes_here: int) -> bool:
    """Whether each of ``processes_here`` processes can copy ``size`` bytes into host memory."""
    return size * processes_here <= (1 - _LEFT_FREE) * available_memory()
