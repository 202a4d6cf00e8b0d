"""Rows of the built-in data sets depend on their seed alone: not on Python's hashes or generator.

As a script, prints a digest of each with seed 3.
"""

import hashlib
import json
import random

import pytest
from python_process import ROOT, environment, python

from dschat.builtin.arithmetic import addition_rows, arithmetic_rows
from dschat.builtin.chat_rows import builtin_rows


def digests(seed: int) -> list[str]:
    makers = (arithmetic_rows, addition_rows, builtin_rows)
    made = (rows(seed) for rows in makers)
    return [hashlib.sha256(json.dumps(rows).encode()).hexdigest() for rows in made]


@pytest.mark.slow
def test_rows_depend_on_the_seed_alone():
    path = f"{ROOT}:{ROOT}/tests"
    done = python(__file__, env=environment(PYTHONHASHSEED="7", PYTHONPATH=path))
    random.seed(5)
    here = digests(3)
    assert done.stdout.split() == here, done.stderr
    assert not set(here) & set(digests(4))


if __name__ == "__main__":
    print(*digests(3))
