"""Rows of the built-in data sets depend on their seed alone: not on Python's hashes or generator.

As a script, prints a digest of each with seed 3.
"""

import hashlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path

from dschat.builtin.arithmetic import arithmetic_rows
from dschat.builtin.chat_rows import builtin_rows
from dschat.builtin.guess_game import guess_rows

ROOT = Path(__file__).parents[2]


def digests(seed: int) -> list[str]:
    made = (rows(seed) for rows in (arithmetic_rows, builtin_rows, guess_rows))
    return [hashlib.sha256(json.dumps(rows).encode()).hexdigest() for rows in made]


def test_rows_depend_on_the_seed_alone():
    variables = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, __file__]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    random.seed(5)
    here = digests(3)
    assert done.stdout.split() == here
    assert not set(here) & set(digests(4))


if __name__ == "__main__":
    print(*digests(3))
