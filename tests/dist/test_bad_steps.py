"""A NaN in one micro-batch of one rank: all ranks skip that step and keep their weights."""

import pytest
from quick import slow
from step_cases import Case
from test_same_losses import close

CASES = [Case("nan", 3, 2)]


def check(result, expected):
    assert result["applied"] == [True, False, True]
    assert result["moved"] == [True, False, True]
    assert close(result["probe"], expected["probe"])


@pytest.mark.parametrize("zero", [0, *slow([1, 2]), 3])
def test_one_process(zero, run_here):
    check(run_here(Case("nan", zero, 4))[0], run_here(Case("skip", 0, 8))[0])


@pytest.mark.dist
@pytest.mark.parametrize(
    "case", [*CASES, *slow([Case("nan", 0, 2), Case("nan", 1, 2), Case("nan", 2, 4)])]
)
def test_two_processes(case, two_processes, run_here):
    check(two_processes(case)[0], run_here(Case("skip", 0, 8))[0])
