"""The counter-based random numbers: the documented hash, uniform and uncorrelated."""

import numpy as np
import pytest
import torch
from sampling_oracle import p_value

from dschat.inference.sampling import uniforms


def splitmix(seed, *where):
    """The hash in plain integers: SplitMix64's finalizer after every counter."""
    gamma, mask = 0x9E3779B97F4A7C15, (1 << 64) - 1

    def mix(x):
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    state = seed & mask
    for counter in where:
        state = (mix((state + gamma) & mask) + counter * gamma) & mask
    return (mix((state + gamma) & mask) >> 11) * 2.0**-53


def test_uniforms_are_the_documented_hash_and_broadcast():
    prompts, samples = torch.tensor([0, 3, 10**9, 3]), torch.tensor([0, 1, 2, 0])
    positions = torch.arange(5)
    for seed in (0, 17, -4, 2**31 * 1_000_003 + 5):  # step 3's seeds grow with every iteration
        block = uniforms(seed, prompts[:, None], samples[:, None], positions[None])
        assert block.shape == (4, 5)
        assert block.dtype == torch.float64
        for row in range(4):
            for t in range(5):
                where = prompts[row].item(), samples[row].item(), t
                assert block[row, t].item() == splitmix(seed, *where)
            one = uniforms(seed, prompts[row : row + 1], samples[row : row + 1], positions[2:3])
            assert one.item() == block[row, 2].item()


def test_uniforms_are_uniform_and_independent_across_counters():
    size = 24
    axis = torch.arange(size)
    seeds = (17, 18, 17 + (1 << 40), -17)
    values, *others = (uniforms(s, axis[:, None, None], axis[:, None], axis) for s in seeds)
    assert values.shape == (size, size, size)
    flat = values.flatten().numpy()
    assert 0 <= flat.min() < flat.max() < 1
    assert len(np.unique(flat)) == size**3
    counts, _ = np.histogram(flat, bins=64, range=(0, 1))
    assert p_value(counts, np.full(64, size**3 / 64)) > 1e-3
    limit = 4 / np.sqrt(size**3)
    for dim in range(3):  # neighbours along every counter are uncorrelated
        a, b = (values.narrow(dim, start, size - 1).flatten() for start in (0, 1))
        assert abs(np.corrcoef(a, b)[0, 1]) < limit
    for other in others:
        assert abs(np.corrcoef(flat, other.flatten())[0, 1]) < limit
    swapped = values.permute(1, 0, 2).flatten().numpy()  # prompt 1 sample 2 is not 2, 1
    assert (swapped != flat).mean() > 0.9


@pytest.mark.parametrize("lag", [1, 2, 3, 7])
def test_uniforms_have_no_memory_along_positions(lag):
    """Serial correlation, and the joint distribution of one sequence's numbers in pairs."""
    rows = torch.arange(40).unsqueeze(-1)
    values = uniforms(23, rows // 4, rows % 4, torch.arange(1000).unsqueeze(0)).numpy()
    early, late = values[:, :-lag].ravel(), values[:, lag:].ravel()
    assert abs(np.corrcoef(early, late)[0, 1]) < 4 / np.sqrt(early.size)
    counts, *_ = np.histogram2d(early, late, bins=16, range=[[0, 1], [0, 1]])
    assert p_value(counts.ravel(), np.full(256, early.size / 256)) > 1e-4
