"""What a reward function returns, as one value per sample."""

import numpy as np
import pytest
import torch

from dschat.rewards.call import values_of
from dschat.user_code.calls import Fault


def test_results():
    lengths = [2, 1, 3]
    for result in (
        [1, 0.5, True],
        (1, 0.5, 1),
        np.array([1, 0.5, 1], dtype=np.float32),
        torch.tensor([1, 0.5, 1]),
        [np.float64(1), torch.tensor(0.5), np.int64(1)],
    ):
        assert values_of(result, lengths) == [1, 0.5, 1]
    mixed = [[0.5, 1], None, torch.tensor([1.0, 2, 3])]
    assert values_of(mixed, lengths) == [[0.5, 1], None, [1, 2, 3]]
    assert values_of([], []) == []


@pytest.mark.parametrize(
    ("result", "problem"),
    [
        ([1.0], "returned 1 values for 2 samples"),
        (1.0, "returned 1.0, not a list with one number per sample"),
        (None, "returned None, not a list with one number per sample"),
        ((1.0 for _ in "ab"), "returned a generator, not a list with one number per sample"),
        ({"a": 1.0}, "returned a dict, not a list with one number per sample"),
    ],
)
def test_an_invalid_result_is_a_fault_of_the_call(result, problem):
    with pytest.raises(Fault) as caught:
        values_of(result, [1, 1])
    assert caught.value.problem == problem


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (float("nan"), "returned nan"),
        (float("-inf"), "returned -inf"),
        (1e300, "returned 1e+300, which is too large"),
        (10**400, "returned a number that is too large"),
        ("1", "returned '1', not a number"),
        (b"", "returned b'', not a number"),
        (object(), "returned a object, not a number"),
        ([1.0], "returned 1 values for an answer of 2 tokens"),
        ([1.0, float("nan")], "returned nan for a token"),
    ],
)
def test_an_invalid_value_is_a_fault_of_its_sample(value, problem):
    before, fault, after = values_of([1.0, value, None], [2] * 3)
    assert (before, after) == (1.0, None)
    assert isinstance(fault, Fault)
    assert fault.problem == problem
