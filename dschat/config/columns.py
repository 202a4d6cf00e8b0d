"""Columns of a data set by role, and paths into the values of a column."""

from collections.abc import Sequence
from typing import Any, Optional

from dschat.config.errors import require

ROLES = ("prompt", "chosen", "rejected", "messages", "answers", "ranks", "scores")


def columns_by_role(columns: Optional[list[str]], roles: Sequence[str] = ROLES) -> dict[str, Any]:
    """The items ROLE=COLUMN of ``--columns``; ``UserError`` for one of another form."""
    found: dict[str, Any] = {}
    for item in columns or ():
        role, _, column = item.partition("=")
        require(bool(column), f"--columns {item}: write ROLE=COLUMN, such as prompt=question")
        require(role in roles, f"--columns {item}: no such role; choose from {', '.join(roles)}")
        require(role not in found, f"--columns names two columns for {role}; leave one out")
        found[role] = column
    return found


def look_up(row: dict[str, Any], path: Optional[str]) -> Any:
    """The value at a column, or at a path into it such as ``answers.0.text``; None if absent.

    ``answers.*.text`` is the list of all texts.
    """
    if path is None:
        return None
    if path in row:
        return row[path]
    value: Any = row
    steps = path.split(".")
    for number, step in enumerate(steps):
        if step == "*" and isinstance(value, list):
            rest = ".".join(steps[number + 1 :])
            return [look_up(item, rest) if isinstance(item, dict) else None for item in value]
        if isinstance(value, dict) and step == "*":
            continue  # an object of lists, such as a Sequence of `datasets`
        if isinstance(value, dict):
            value = value.get(step)
        elif isinstance(value, list) and step.isdecimal() and int(step) < len(value):
            value = value[int(step)]
        else:
            return None
    return value
