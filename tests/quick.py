"""Which parameters of a test the quick suite takes; the others are marked slow. A tuple holds the
values of several arguments.
"""

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def slow(values: Iterable[Any]) -> list[Any]:
    """All of ``values``, left to the slow tests."""
    return [
        pytest.param(*(v if isinstance(v, tuple) else [v]), marks=pytest.mark.slow) for v in values
    ]


def some(values: Iterable[Any], quick: Iterable[Any]) -> list[Any]:
    """``values``, of which the quick suite takes those in ``quick``."""
    values, quick = list(values), list(quick)
    assert all(value in values for value in quick), quick
    found = [*quick, *slow(value for value in values if value not in quick)]
    assert len(found) == len(values), "two of the values are equal"
    return found


def each_once(*axes: Iterable[Any]) -> list[Any]:
    """The product of ``axes``, of which the quick suite takes as few as have every value."""
    values = [list(axis) for axis in axes]
    quick = [tuple(axis[i % len(axis)] for axis in values) for i in range(max(map(len, values)))]
    return some(itertools.product(*values), quick)
