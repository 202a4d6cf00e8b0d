"""UserError, for mistakes that the user can fix, and helpers that raise it."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake that the user can fix: one line with flag or file, and remedy. Exit code 2."""


def require(condition: bool, message: str) -> None:
    """Raise ``UserError`` unless ``condition`` holds."""
    if not condition:
        raise UserError(message)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type's name where the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def did_you_mean(name: str, names: Iterable[str], prefix: str = "") -> str:
    """``"; did you mean NAME?"`` with the closest of ``names``; empty if none is close."""
    near = difflib.get_close_matches(name, sorted(names), n=1)
    return f"; did you mean {prefix}{near[0]}?" if near else ""
