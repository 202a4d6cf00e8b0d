"""Top-k, top-p and min-p against their definition, token by token."""

import numpy as np
import pytest
import torch
from sampling_oracle import exact

from dschat.inference.protocol import SamplingParams
from dschat.inference.sampling import truncate


def test_truncation_is_its_definition_however_wide_the_nucleus():
    """Narrow, middling and wide rows side by side: all three looks of top-p, and top-k's."""
    scales = [8.0, 0.01, 3.0, 1.0, 5.0, 0.3]
    logits = np.random.default_rng(7).normal(size=(6, 6000)).astype(np.float32)
    logits *= np.array(scales, dtype=np.float32)[:, None]
    probs = torch.from_numpy(logits).softmax(-1)
    sizes = set()
    for options in (
        {"top_p": 0.9},
        {"top_p": 0.5, "min_p": 0.01},
        {"top_k": 700},
        {"top_k": 700, "top_p": 0.6, "min_p": 0.002},
    ):
        for scale in (1.0, 37.0):  # need not be normalized
            kept = truncate(probs * scale, SamplingParams(**options))
            for row in range(6):
                expected = exact(logits[row], **options) > 0
                assert np.array_equal(kept[row].numpy() > 0, expected)
                sizes.add(int(expected.sum()))
            assert torch.equal(kept[kept > 0], (probs * scale)[kept > 0])
    assert min(sizes) < 128 < 1000 < max(sizes)
    assert max(sizes) > 4096


def test_ties_keep_no_more_than_the_definition_counts():
    kept = truncate(torch.full((2, 8), 0.125), SamplingParams(top_k=3))
    assert (kept > 0).sum(1).tolist() == [3, 3]
    kept = truncate(torch.full((2, 8), 0.125), SamplingParams(top_p=0.5))
    assert (kept > 0).sum(1).tolist() == [4, 4]
    for size in (200, 3000, 8192, 12_000):  # the 128 likeliest are any 128
        kept = truncate(torch.ones(2, size), SamplingParams(top_p=0.625))
        assert (kept > 0).sum(1).tolist() == [size * 5 // 8] * 2
    assert truncate(torch.ones(1, 8), SamplingParams(min_p=0.99)).sum() == 8
    kept = truncate(torch.tensor([[4.0, 1.0, 2.0]]), SamplingParams(min_p=0.5))
    assert kept.tolist() == [[4, 0, 2]]  # what is at the bound stays


@pytest.mark.parametrize("share", [0.02, 0.1, 0.3, 0.6, 0.9])
def test_ties_are_not_kept_twice_by_a_second_look(share):
    """Which of many equals are among the 128 likeliest is chance; a wider look may see others."""
    probs = torch.randint(1, 4, (8, 9000), generator=torch.Generator().manual_seed(0)).float()
    probs[:4] = 1.0
    kept = truncate(probs, SamplingParams(top_p=share))
    for row in range(8):
        order = np.sort(probs[row].numpy().astype(np.float64))[::-1]
        needed = np.searchsorted(np.cumsum(order), share * order.sum()) + 1  # whole numbers: exact
        assert (kept[row] > 0).sum() == needed
