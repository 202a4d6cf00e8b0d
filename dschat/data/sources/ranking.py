"""Reads the ranked answers of a row: a list of answers with a rank or a score for each.

All functions are pure.
"""

import math
from collections.abc import Sequence
from typing import Any, Union

from dschat.data.sources.turns import Unusable, from_cell

Ranked = tuple[list[Any], list[int]]  # answers, best first, and their ranks from 0


def read_ranked(answers: Any, values: Any, higher_is_better: bool) -> Union[Ranked, Unusable]:
    """The answers of a row by rank; answers with equal values tie and keep their order.

    Args:
        answers, values: the row's lists, or their JSON, as in a CSV cell.
        higher_is_better: ``values`` are scores, not ranks.
    """
    answers, values = from_cell(answers), from_cell(values)
    for name, cell in (("answers", answers), ("ranks or scores", values)):
        if not isinstance(cell, list):
            return Unusable(f"no list of {name}")
    if len(answers) != len(values):
        return Unusable(f"{len(values)} ranks or scores for {len(answers)} answers")
    if len(answers) < 2:
        return Unusable("fewer than two answers to compare")
    numbers = [_number(value) for value in values]
    if not all(map(math.isfinite, numbers)):
        return Unusable("a rank or score that is not a number")
    numbers = [-number if higher_is_better else number for number in numbers]
    distinct = sorted(set(numbers))
    if len(distinct) < 2:
        return Unusable("answers that all tie")
    order = sorted(range(len(answers)), key=lambda i: numbers[i])
    return [answers[i] for i in order], [distinct.index(numbers[i]) for i in order]


def ranked_pairs(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """(better, worse) indices of all answers that do not tie."""
    k = len(ranks)
    return [(i, j) for i in range(k) for j in range(k) if ranks[i] < ranks[j]]


def _number(value: Any) -> float:
    """A number, also from its text; NaN for anything else."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
