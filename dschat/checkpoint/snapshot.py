"""Copies training state to host memory, so that training continues while the copy is written."""

import copy
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import dschat.distributed as dist
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


# -- random generators -----------------------------------------------------------------------------


def read_generators() -> dict[str, Tensor]:
    """States of this process's global generators, on CUDA also of its device's. Sampling of answers
    uses none of them.
    """
    version, words, gauss = random.getstate()
    numpy_state = np.random.get_state()
    assert isinstance(numpy_state, tuple), "unknown generator"
    kind, key, position, has_gauss, cached = numpy_state
    assert (version, kind) == (3, "MT19937"), "unknown generator"
    tensors = {
        "python": torch.tensor(words, dtype=torch.int64),  # (625,)
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.tensor([*key.tolist(), position, has_gauss], dtype=torch.int64),  # (626,)
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if dist.device().type == "cuda":
        tensors["cuda"] = torch.cuda.get_rng_state(dist.device())
    return tensors


def write_generators(tensors: Mapping[str, Tensor]) -> None:
    """Restore the states from `read_generators`."""
    gauss = tensors["python_gauss"].tolist()
    random.setstate((3, tuple(tensors["python"].tolist()), gauss[0] if gauss else None))
    *key, position, has_gauss = tensors["numpy"].tolist()
    words = np.array(key, dtype=np.uint32)
    np.random.set_state(
        ("MT19937", words, position, has_gauss, float(tensors["numpy_gauss"].item()))
    )
    torch.set_rng_state(tensors["torch"])
    if "cuda" in tensors and dist.device().type == "cuda":
        torch.cuda.set_rng_state(tensors["cuda"], dist.device())


def seed_generators(seed: int, rank: int, step: int) -> None:
    """Seed the generators of a rank that is not in the checkpoint of ``step``."""
    sequence = np.random.SeedSequence([seed % 2**64, rank, step])
    first, second, third = sequence.generate_state(3, np.uint32).tolist()
    random.seed(first)
    np.random.seed(second)
    torch.manual_seed(third)  # those of all devices too
