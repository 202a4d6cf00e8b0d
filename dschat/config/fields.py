"""What a knob is: a dataclass field with its type and help text; and the error for one that cannot
work.

It must not know any knob.
"""

import functools
import math
import os
from dataclasses import field, fields
from numbers import Integral, Real
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from dschat.config.errors import UserError

# What is larger is no setting but a slip, and infinite once fp32 multiplies it.
LARGEST = 1e6


def flag(default: Any, help: str, **metadata: Any) -> Any:
    """A dataclass field that carries its help text; mutable defaults are copied per instance."""
    metadata["help"] = help
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def require_types(config: Any, prefix: str = "--") -> None:
    """Raise ``UserError`` for the first field of a dataclass whose value is not of its type.

    Flags are typed already; fields that are set in Python, or by a YAML file's author, are not.
    Whole numbers must fit in 64 bits, others lie within +-``LARGEST``.
    """
    hints = _hints(type(config))
    for f in fields(config):
        value = getattr(config, f.name)
        problem = _type_problem(value, hints[f.name])
        if problem:
            shown = repr(value) if len(repr(value)) <= 80 else f"{repr(value)[:77]}..."
            raise UserError(f"{prefix}{f.name} {shown} {problem}")


_hints = functools.cache(get_type_hints)


def _type_problem(value: Any, hint: Any) -> str:
    """What keeps ``value`` from being one of ``hint``; empty where nothing does."""
    kind, choices = get_origin(hint), get_args(hint)
    if kind is Union:
        return "" if value is None else _type_problem(value, choices[0])
    if kind is Literal:
        known = isinstance(value, str) and value in choices
        return "" if known else f"is not one of {', '.join(map(str, choices))}"
    if kind in (list, tuple):
        return _list_problem(value, choices[0], may_be_empty=kind is tuple)
    if hint is bool:
        return "" if isinstance(value, bool) else "is neither true nor false"
    if hint is int:
        if not isinstance(value, Integral) or isinstance(value, bool):
            return "is not a whole number"
        return "" if -(2**63) <= value < 2**63 else "is too large a number"
    if hint is float:
        if not isinstance(value, Real) or isinstance(value, bool):
            return "is not a number"
        if not _is_finite(value):
            return "is not a finite number"
        if abs(value) > LARGEST:
            return f"is out of range; it must be between -{LARGEST:.0f} and {LARGEST:.0f}"
        # What is read from a flag is a float, and would be another number.
        is_exact = not isinstance(value, Integral) or float(value) == value
        return "" if is_exact else "has more digits than a float"
    if not isinstance(value, (str, os.PathLike)):
        return "is not text"
    if str(value) == "--":  # which command lines read as the end of flags
        return "is no name"
    return "holds a null character" if "\0" in str(value) else ""


def _list_problem(value: Any, hint: Any, may_be_empty: bool) -> str:
    if not isinstance(value, (list, tuple)):
        return "is not a list"
    if not value and not may_be_empty:
        return "is empty; leave it out, or name at least one"
    for item in value:
        problem = _type_problem(item, hint)
        if problem:
            return f"holds what {problem}"
        if hint is str and str(item).startswith("-"):
            return f"holds {item}, which a command line takes for a flag; a file is ./{item}"
    return ""


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond any float
        return False
