"""Edge-case rows for the tests of losses, and the comparison with float64 NumPy.

Rows have answers of one token, truncated answers that fill the width, and no actions at all; masked
elements hold NaN, inf and huge numbers. The caller passes a seeded generator.
"""

import numpy as np
import torch

GARBAGE = (float("nan"), float("inf"), float("-inf"), 1e30)
SEEDS = range(4)


def answer_lens(rng: np.random.Generator, num_rows: int, width: int) -> list[int]:
    """Lengths with the edge cases first: no token, one token, the full width (truncated)."""
    lens = [0, 1, width, *rng.integers(0, width + 1, size=num_rows)]
    return [int(n) for n in lens[:num_rows]]


def mask_of(lens: list[int], width: int) -> torch.Tensor:
    return torch.tensor([[t < n for t in range(width)] for n in lens])


def with_garbage(x: np.ndarray, mask: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    """fp32 ``x`` with NaN, inf or a huge number wherever ``mask`` is False."""
    out = torch.tensor(x, dtype=torch.float32)
    junk = torch.tensor(rng.choice(GARBAGE, size=tuple(mask.shape)), dtype=torch.float32)
    return torch.where(mask, out, junk)


def in_fp32(x: np.ndarray) -> np.ndarray:
    """``x`` as float64 numbers that fp32 represents exactly: the input of both implementations."""
    return np.asarray(x, dtype=np.float32).astype(np.float64)


def some_cuts(rng: np.random.Generator, num_rows: int) -> list[list[slice]]:
    """Partitions of rows: one part, one row per part, and random parts with an empty one.

    Parts stand for ranks or micro-batches.
    """
    edges = sorted(int(e) for e in rng.integers(0, num_rows + 1, size=3))
    bounds = [[0, num_rows], list(range(num_rows + 1)), [0, 0, *edges, num_rows]]
    return [[slice(a, b) for a, b in zip(ends, ends[1:], strict=False)] for ends in bounds]


def as_np(x: torch.Tensor) -> np.ndarray:
    return x.detach().double().numpy()


def assert_close(actual: torch.Tensor, expected, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    assert actual.dtype == torch.float32
    np.testing.assert_allclose(as_np(actual), expected, rtol=rtol, atol=atol)


def check_metrics(actual: dict[str, torch.Tensor], expected: dict[str, float]) -> None:
    """Assert that ``actual`` has these names and values, as detached 0-d fp32 tensors."""
    assert set(actual) == set(expected)
    for name, value in actual.items():
        assert value.ndim == 0, name
        assert not value.requires_grad, name
        assert_close(value, expected[name])
