"""Tensors for the tests of Triton kernels: seeded inputs, and outputs that show stray writes."""

import numpy as np
import torch

POISON = 24.0  # exact in every dtype; no result is near it
_EDGE = 64  # elements on both sides

# Largest error, as a share of the largest expected number: sums are in fp32, results are rounded.
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def poisoned(*shape, dtype=torch.float32):
    """A tensor inside a larger one, which is poisoned."""
    count = int(np.prod(shape))
    return torch.full((count + 2 * _EDGE,), POISON, dtype=dtype)[_EDGE:-_EDGE].view(shape)


def surroundings(tensor):
    """What lies before and after a `poisoned` tensor."""
    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return torch.cat([whole[:_EDGE], whole[-_EDGE:]])


def exact(x):
    return x.double().numpy()


def assert_close(got, expected, dtype=None):
    error = np.abs(exact(got) - expected).max()
    limit = TOLERANCES[dtype or got.dtype] * np.abs(expected).max()
    assert error <= limit, f"off by {error}, more than {limit}"  # also if it is NaN


def assert_written(got, expected, dtype=None):
    """``got``, a poisoned tensor, has ``expected`` and nothing was written around it."""
    assert (surroundings(got) == POISON).all()
    assert_close(got, expected, dtype)
