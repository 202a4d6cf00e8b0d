"""A copy of training state in host memory, which training then no longer touches.

State comes in, nested as DeepSpeed nests it; its copy, or its size, goes out. It must not know what
the state means, nor where it is written.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dschat.memory import available_memory

# Of the memory that is free, what a snapshot leaves to everything else.
_LEFT_FREE = 0.25


def snapshot(state: Any) -> Any:
    """``state`` with every tensor copied to host memory, and every other object copied.

    One tensor under several names (tied weights) stays one. A view is copied alone, without the
    buffer it lies in.
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
    """What `snapshot` will take."""
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
    """Whether each of ``processes_here`` may copy ``size`` bytes into this host's memory."""
    return size * processes_here <= (1 - _LEFT_FREE) * available_memory()
