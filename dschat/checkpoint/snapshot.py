"""Copies training state to host memory, so that training continues while the copy is written."""

import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from dschat.memory import available_memory

# Fraction of the free memory that a snapshot leaves unused.
_LEFT_FREE = 0.25


def snapshot(state: Any) -> Any:
    """``state`` with every tensor copied to host memory, and every other object copied.

    A tensor under several names (tied weights) is copied once, a view without the rest of its
    storage.
    """
    seen: dict[tuple, Tensor] = {}

    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)  # NOTE: loss scalers change in place
        key = _identity(value)
        if key not in seen:
            seen[key] = value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        return seen[key]

    return tree_map(copied, state)


def _identity(tensor: Tensor) -> tuple:
    return (
        *(tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset()),
        *(tensor.dtype, tensor.shape, tensor.stride()),
    )


def num_bytes(state: Any) -> int:
    """Bytes that `snapshot` allocates."""
    tensors = (leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor))
    return sum({_identity(tensor): tensor.nbytes for tensor in tensors}.values())


def fits(size: int, processes_here: int) -> bool:
    """Whether each of ``processes_here`` processes can copy ``size`` bytes into host memory."""
    return size * processes_here <= (1 - _LEFT_FREE) * available_memory()
