"""Tasks of reasoning-gym: the rows of ``reasoning_gym/NAME``, and the library's scores of answers.

Both are made in other processes: the rows of some tasks depend on the order of sets, which there is
the same in every run; some tasks evaluate what a model wrote, which may take forever.
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

from dschat.config.errors import UserError, require
from dschat.user_code.calls import Fault
from dschat.user_code.processes import Worker

COLUMNS = "question", "answer", "task", "settings", "entry"
_REFUSED = {
    "composite": "mixes other tasks; name these, with weights",
    "game_of_life_halting": "takes any text as right where the answer is True; leave it out",
}
_LIMIT_S = 4 * 3600.0  # of all rows of a task; 1,000 of knight_swap take an hour


class Tasks:
    """The function of the processes: a task's rows; with ``entry``, its score of ``answer``."""

    def __init__(self) -> None:
        import reasoning_gym.factory

        self._known, make = reasoning_gym.factory.DATASETS, reasoning_gym.create_dataset
        self._made = cache(lambda task, settings: make(task, **json.loads(settings)))

    def __call__(self, task: str, settings: str, answer: str = "", entry: str = "") -> Any:
        if entry:
            try:
                known = ast.literal_eval(entry)
                score = float(self._made(task, settings).score_answer(answer, known))
                return score if math.isfinite(score) else 0.0
            except BaseException:  # some tasks evaluate what a model wrote: exit()
                return 0.0
        if why := _REFUSED.get(task):
            return f"reasoning_gym/{task} {why}"
        if task not in self._known:
            names = ", ".join(sorted({*self._known} - {*_REFUSED}))
            return f"no task {task} in reasoning-gym {version('reasoning-gym')}; it has: {names}"
        random.seed(0)  # list_functions draws from it
        rows = self._made(task, settings)
        return [(r["question"], r["answer"], task, settings, repr(_plain(r))) for r in rows]


def task_rows(name: str, settings: dict[str, Any], flag: str) -> Iterator[dict[str, Any]]:
    """The rows of a task, of ``COLUMNS``; ``UserError`` for a task or settings that it has not."""
    worker = Worker(f"{__name__}:Tasks", (), os.environ | {"PYTHONHASHSEED": "0"})
    try:
        rows = worker.call(name, settings_of(settings), limit_s=_LIMIT_S)
    except Fault as fault:
        raise UserError(f"{flag} reasoning_gym/{name} {fault}; see --reasoning_gym") from None
    finally:
        worker.stop()
    require(not isinstance(rows, str), f"{flag}: {rows}")
    return (dict(zip(COLUMNS, row, strict=True)) for row in rows)


def settings_of(settings: dict[str, Any]) -> str:
    return json.dumps({"size": 1000, "seed": 0} | settings, sort_keys=True)


def _plain(value: Any) -> Any:
    """``value`` as Python's literals; what is none, such as a fraction, as text."""
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return type(value)(map(_plain, value))
    is_literal = value is None or type(value) in (bool, int, str)
    return value if is_literal or isinstance(value, float) and math.isfinite(value) else str(value)
