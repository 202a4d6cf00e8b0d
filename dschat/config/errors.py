"""UserError, for mistakes that the user can fix, and helpers that raise and show it."""

import difflib
import re
from collections.abc import Iterable

# Control characters, which a terminal executes, and marks that reorder the text around them.
_UNSEEN = re.compile("[\0-\b\v-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


class UserError(ValueError):
    """A mistake that the user can fix: one line with flag or file, and remedy. Exit code 2."""


def require(condition: bool, message: str) -> None:
    """Raise ``UserError`` unless ``condition`` holds."""
    if not condition:
        raise UserError(message)


def printable(text: str) -> str:
    """``text`` with its control characters, except newlines and tabs, and bidi marks escaped."""
    return _UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type's name where the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def did_you_mean(name: str, names: Iterable[str], prefix: str = "") -> str:
    """``"; did you mean NAME?"`` with the closest of ``names``; empty if none is close."""
    near = difflib.get_close_matches(name, sorted(names), n=1, cutoff=0.75)
    return f"; did you mean {prefix}{near[0]}?" if near else ""
