"""Tasks of reasoning-gym: the rows of ``reasoning_gym/NAME``, and the library's scores of answers.

Both are made in other processes. The rows of some tasks depend on the order of sets, which there is
the same in every run; scores may take forever, and those of some tasks evaluate what a model wrote.
"""

import ast
import json
import math
import os
import random
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from typing import Any

from dschat.config import UserError
from dschat.user_code.calls import Fault
from dschat.user_code.processes import Worker

COLUMNS = ["question", "answer", "task", "settings", "entry"]
_SIZE = {"size": 1000, "seed": 0}
_REFUSED = {
    "composite": "mixes other tasks; name these, with weights",
    "game_of_life_halting": "takes any text as right where the answer is True; leave it out",
}
_LIMIT_S = 4 * 3600.0  # of all rows of a task; 1,000 of knight_swap take an hour


class Tasks:
    """The function of the processes: a task's rows; with ``entry``, its score of ``answer``."""

    def __init__(self) -> None:
        import reasoning_gym.factory

        self._known = reasoning_gym.factory.DATASETS
        self._made = cache(
            lambda task, text: reasoning_gym.create_dataset(task, **json.loads(text))
        )

    def __call__(self, task: str, settings: str, answer: str = "", entry: str = "") -> Any:
        if entry:
            try:
                dataset, known = self._made(task, settings), ast.literal_eval(entry)
                score = float(dataset.score_answer(answer, known))
            except Exception:  # the library's code on what a model wrote
                return 0.0
            return score if math.isfinite(score) else 0.0
        if why := _REFUSED.get(task):
            return f"reasoning_gym/{task} {why}"
        if task not in self._known:
            names = ", ".join(sorted({*self._known} - {*_REFUSED}))
            return f"no task {task} in reasoning-gym {version('reasoning-gym')}; it has: {names}"
        random.seed(0)  # list_functions draws from it
        made = self._made(task, settings)
        rows = map(made.__getitem__, range(len(made)))
        return [(r["question"], r["answer"], task, settings, repr(_plain(r))) for r in rows]


def task_rows(name: str, settings: dict[str, Any], flag: str) -> Iterator[dict[str, Any]]:
    """The rows of a task, of ``COLUMNS``: texts, but an answer may be None. ``UserError`` for an
    unknown task, and for settings that it does not take.
    """
    worker = Worker(f"{__name__}:Tasks", (), {**os.environ, "PYTHONHASHSEED": "0"})
    try:
        rows = worker.call(name, settings_of(settings), limit_s=_LIMIT_S)
    except Fault as fault:
        raise UserError(f"{flag} reasoning_gym/{name} {fault}; see --reasoning_gym") from None
    finally:
        worker.stop()
    if isinstance(rows, str):
        raise UserError(f"{flag}: {rows}")
    return (dict(zip(COLUMNS, row, strict=True)) for row in rows)


def settings_of(settings: dict[str, Any]) -> str:
    return json.dumps(_SIZE | settings, sort_keys=True)


def _plain(value: Any) -> Any:
    """``value`` as Python's literals; what is none, such as a fraction, as text."""
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    for kind in (list, tuple, set):
        if isinstance(value, kind):
            return kind(map(_plain, value))
    is_literal = value is None or type(value) in (bool, int, str)
    return value if is_literal or isinstance(value, float) and math.isfinite(value) else str(value)
