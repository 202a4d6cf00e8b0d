"""Advantages without a critic, and shaping of scores, against `float64_step` and by hand: from the
papers, sample by sample and token by token, no sums over groups.
"""

import math

import numpy as np
import pytest
import torch
from float64_step import compared, discounted
from hypothesis import given
from hypothesis import strategies as st
from loss_rows import (
    SEEDS,
    answer_lens,
    assert_close,
    in_fp32,
    mask_of,
    some_cuts,
    with_garbage,
)

from dschat import losses

ESTIMATORS = ("grpo", "dr_grpo", "rloo")


def naive_group_advantages(scores, group_ids, estimator: str) -> list[float]:
    """Each score against those of its group."""
    groups = [[s for s, g in zip(scores, group_ids, strict=True) if g == own] for own in group_ids]
    return [compared(s, group, estimator) for s, group in zip(scores, groups, strict=True)]


def group_advantages(estimator: str, scores, group_ids, num_groups: int) -> torch.Tensor:
    """The same through dschat, as one process does it."""
    scores = torch.tensor(scores, dtype=torch.float32)
    group_ids = torch.tensor(group_ids, dtype=torch.int64)
    stats = losses.group_stats(scores, group_ids, num_groups)
    return getattr(losses, f"{estimator}_advantages")(scores, group_ids, stats)


def random_groups(seed: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Scores, group ids, number of groups: groups of 1 to 9 in disorder; one equal, one empty."""
    rng = np.random.default_rng(seed)
    sizes = [1, 2, 4, 0, *rng.integers(1, 10, size=4)]
    scores = np.concatenate([rng.normal(rng.normal(0, 5), rng.uniform(0.1, 3), n) for n in sizes])
    group_ids = np.repeat(np.arange(len(sizes)), sizes)
    scores[group_ids == 2] = 0.1
    order = rng.permutation(len(scores))
    return in_fp32(scores[order]), group_ids[order], len(sizes)


# ---- groups


@pytest.mark.parametrize(
    ("estimator", "scores", "expected"),
    [
        # Two of four right: mean 1/2; std with n - 1 = sqrt(4 / 4 / 3) = 0.577350.
        ("grpo", [1, 0, 0, 1], [0.8660254, -0.8660254, -0.8660254, 0.8660254]),
        ("dr_grpo", [1, 0, 0, 1], [0.5, -0.5, -0.5, 0.5]),
        ("rloo", [1, 0, 0, 1], [2 / 3, -2 / 3, -2 / 3, 2 / 3]),
        # Deviations of 3, -1, -2 from the mean of 3; std = sqrt(14 / 2).
        ("grpo", [6, 2, 1], [3 / math.sqrt(7), -1 / math.sqrt(7), -2 / math.sqrt(7)]),
        ("dr_grpo", [6, 2, 1], [3, -1, -2]),
        ("rloo", [6, 2, 1], [4.5, -1.5, -3]),
        # One right of eight: std = sqrt(1/8) with n - 1, whatever n with one right.
        ("grpo", [0] * 7 + [1], [-0.125 * math.sqrt(8)] * 7 + [0.875 * math.sqrt(8)]),
        ("rloo", [0] * 7 + [1], [-1 / 7] * 7 + [1]),
        # A spread of the size of grpo's 1e-6: std = 1e-6 * sqrt(2), which the eps then softens.
        ("grpo", [2e-6, 0], [1e-6 / (1.41421356e-6 + 1e-6), -1e-6 / (1.41421356e-6 + 1e-6)]),
        *[(name, [3.0], [0.0]) for name in ESTIMATORS],
        *[(name, [0.1] * 7, [0.0] * 7) for name in ESTIMATORS],
    ],
)
def test_groups_by_hand(estimator, scores, expected):
    np.testing.assert_allclose(
        naive_group_advantages(scores, [0] * len(scores), estimator), expected, rtol=1e-5, atol=1e-9
    )
    assert_close(group_advantages(estimator, scores, [0] * len(scores), 1), expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_groups_split_over_ranks_have_the_same_statistics_and_advantages(seed):
    scores, group_ids, num_groups = random_groups(seed)
    expected = np.zeros((3, num_groups))
    for score, group in zip(scores, group_ids, strict=True):
        expected[:, group] += (1.0, score, score**2)
    as_score = torch.tensor(scores, dtype=torch.float32)
    as_id = torch.tensor(group_ids)
    for ranks in some_cuts(np.random.default_rng(seed), len(scores)):
        parts = [losses.group_stats(as_score[part], as_id[part], num_groups) for part in ranks]
        assert all(stats.dtype == torch.float64 for stats in parts)
        stats = sum(parts)
        np.testing.assert_allclose(stats.numpy(), expected, rtol=1e-12)
        for name in ESTIMATORS:
            advantages_of = getattr(losses, f"{name}_advantages")
            advantages = [advantages_of(as_score[part], as_id[part], stats) for part in ranks]
            assert_close(
                torch.cat(advantages),
                naive_group_advantages(scores, group_ids, name),
                atol=3e-6,
            )


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_scores_far_from_zero_keep_what_digits_they_have(estimator):
    """1e4 and 1e4 + 1e-3 are neighbours in fp32; only a difference is left, and it must count."""
    scores = in_fp32([1e4, 1e4, 1e4 + 1e-3, 1e4, 1e4 + 3e-3])
    assert len(set(scores)) == 3
    expected = naive_group_advantages(scores, [0] * 5, estimator)
    # The squares are near 1e8, so the variance of 1e-6 has two digits left; means have them all.
    rtol = 0.1 if estimator == "grpo" else 1e-5
    actual = group_advantages(estimator, scores, [0] * 5, 1)
    assert_close(actual, expected, rtol=rtol, atol=1e-9)
    equal = group_advantages(estimator, scores[[4] * 7], [0] * 7, 1)
    assert (equal == 0).all()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_advantages_are_constants_of_the_update(estimator):
    scores = torch.tensor([1.0, 0.0, 3.0], requires_grad=True)
    group_ids = torch.tensor([0, 0, 0])
    stats = losses.group_stats(scores, group_ids, 1)
    advantages = getattr(losses, f"{estimator}_advantages")(scores, group_ids, stats)
    assert not stats.requires_grad
    assert not advantages.requires_grad


# ---- which groups teach something (DAPO, arXiv 2503.14476, eq. 11)


@pytest.mark.parametrize("seed", SEEDS)
def test_groups_with_variance(seed):
    scores, group_ids, num_groups = random_groups(seed)
    expected = []
    for group in range(num_groups):
        own = {score for score, g in zip(scores, group_ids, strict=True) if g == group}
        expected.append(len(own) > 1)
    assert expected[:4] == [False, True, False, False]  # one, two, four equal, none at all
    stats = losses.group_stats(
        torch.tensor(scores, dtype=torch.float32), torch.tensor(group_ids), num_groups
    )
    varied = losses.group_has_variance(stats)
    assert varied.dtype == torch.bool
    assert varied.tolist() == expected


def has_variance(scores) -> bool:
    scores = torch.tensor(scores, dtype=torch.float32)
    stats = losses.group_stats(scores, torch.zeros(len(scores), dtype=torch.int64), 1)
    return bool(losses.group_has_variance(stats))


@given(st.floats(-1e6, 1e6, width=32), st.integers(1, 64))
def test_equal_scores_have_no_variance_whatever_they_are(score, n):
    assert not has_variance([score] * n)
    if n > 1 and abs(score) < 100:
        assert has_variance([score] * (n - 1) + [score + 1e-2])


@given(st.integers(2, 64), st.data())
def test_right_and_wrong_answers_have_variance(n, data):
    num_right = data.draw(st.integers(1, n - 1))
    assert has_variance([1.0] * num_right + [0.0] * (n - num_right))


def test_rounded_squares_neither_part_equal_scores_nor_join_neighbours():
    scores = np.random.default_rng(0).uniform(-10, 10, size=40)
    assert not any(has_variance([score] * 1000) for score in scores)
    assert has_variance([1e4, 1e4, 1e4 + 1e-3, 1e4])
    assert not has_variance([1e4 + 1e-3] * 4)


# ---- returns (Williams 1992)


@pytest.mark.parametrize(
    ("gamma", "first"),
    # 1 + 2 / 2 + 3 / 4; 2 + 3 / 2; 3
    [(0.5, [2.75, 3.5, 3.0]), (1.0, [6.0, 5.0, 3.0]), (0.0, [1.0, 2.0, 3.0])],
)
def test_returns_to_go_by_hand(gamma, first):
    rewards = torch.tensor([[1.0, 2.0, 3.0], [5.0, 7.0, 7.0], [7.0, 7.0, 7.0]])
    mask = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
    expected = [first, [5.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    assert_close(losses.returns_to_go(rewards, mask, gamma), expected)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("gamma", [1.0, 0.97, 0.3])
def test_returns_to_go(seed, gamma):
    rng = np.random.default_rng(seed)
    width = int(rng.integers(1, 9))
    lens = answer_lens(rng, 7, width)
    mask = mask_of(lens, width)
    rewards = in_fp32(rng.normal(0, 2, (7, width)))
    dirty = with_garbage(rewards, mask, rng).requires_grad_()
    returns = losses.returns_to_go(dirty, mask, gamma)
    assert not returns.requires_grad
    for row, n in enumerate(lens):
        assert_close(returns[row, :n], discounted(rewards[row, :n], gamma), atol=3e-6)
        assert not returns[row, n:].any()


# ---- overlong answers (DAPO, arXiv 2503.14476, eq. 13)


def naive_overlong(length: int, max_len: int, buffer_len: int, penalty: float) -> float:
    free = max_len - buffer_len
    if length <= free or buffer_len == 0:
        return 0.0
    if length <= max_len:
        return penalty * (free - length) / buffer_len
    return -penalty


def test_overlong_penalty_of_the_paper():
    """Sec. 4.1 there: 16,384 tokens are free, and a buffer of 4,096 after them ends at 20,480."""
    lengths = [0, 1, 16_383, 16_384, 16_385, 17_408, 18_432, 20_479, 20_480]
    expected = [0.0, 0.0, 0.0, 0.0, -1 / 4096, -0.25, -0.5, -4095 / 4096, -1.0]
    actual = losses.overlong_penalty(torch.tensor(lengths), 20_480, 4_096, 1.0)
    assert_close(actual, expected, atol=0)
    assert [naive_overlong(n, 20_480, 4_096, 1.0) for n in lengths] == expected


@pytest.mark.parametrize(
    ("max_len", "buffer_len", "penalty"), [(10, 4, 1.0), (10, 9, 0.5), (7, 1, 3.0), (8, 0, 1.0)]
)
def test_overlong_penalty(max_len, buffer_len, penalty):
    lengths = list(range(max_len + 3))  # beyond the maximum it is the whole penalty, no more
    expected = [naive_overlong(n, max_len, buffer_len, penalty) for n in lengths]
    actual = losses.overlong_penalty(torch.tensor(lengths), max_len, buffer_len, penalty)
    assert_close(actual, expected)
