"""Samples are cut into parts; the answers to a prompt stay together."""

import pytest

from dschat.rewards.call import Samples


@pytest.mark.parametrize(
    ("groups", "count", "expected"),
    [
        ([5, 1, 6], 3, [(0, 5), (5, 12)]),  # cuts at 4 and 8 would split a prompt's answers
        ([2, 2, 2, 2], 2, [(0, 4), (4, 8)]),
        ([3, 3], 4, [(0, 3), (3, 6)]),
        ([1] * 5, 2, [(0, 2), (2, 5)]),
        ([7], 3, [(0, 7)]),
        ([2], 8, [(0, 2)]),
        ([], 2, []),
    ],
)
def test_cuts(groups, count, expected):
    prompts = [number for number, size in enumerate(groups) for _ in range(size)]
    ids, texts = [[number] for number in prompts], [f"p{number}" for number in prompts]
    samples = Samples(texts, texts, ids, ids, ["stop"] * len(ids))
    assert samples.cuts(count) == expected
