"""The error for a user's mistake, and the checks that raise it."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake the user can fix: one line naming flag or file, and the remedy. Exit code 2."""


def require(condition: bool, message: str) -> None:
    """Raise ``UserError`` unless ``condition`` holds."""
    if not condition:
        raise UserError(message)


def did_you_mean(name: str, names: Iterable[str], prefix: str = "") -> str:
    """``"; did you mean NAME?"`` for the nearest of ``names``, or nothing where none is near."""
    near = difflib.get_close_matches(name, sorted(names), n=1)
    return f"; did you mean {prefix}{near[0]}?" if near else ""
