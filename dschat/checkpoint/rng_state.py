"""Saves and restores the random generators of a process as tensors: Python's, NumPy's, torch's.

Sampling of answers uses none of them: its numbers depend on seed, prompt and position only.
"""

import random
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

import dschat.distributed as dist


def read_generators() -> dict[str, Tensor]:
    """States of this process's global generators; on CUDA also of its device's."""
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
