"""Declares flags as dataclass fields with help texts, checks the types of their values, and reads
the text files that they name.
"""

import errno
import functools
import json
import os
import re
from collections.abc import Mapping
from dataclasses import InitVar, asdict, dataclass, field, fields
from math import inf
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from dschat.config.errors import UserError
from dschat.config.renamed import require_known

# A flag's whole number, or "auto": the program chooses.
AUTO = "auto"
IntOrAuto = Union[int, str]
_NOT_INT_OR_AUTO = "is neither a whole number nor auto"

# Larger values are typing errors, and overflow once multiplied in fp32.
LARGEST = 1e6


@dataclass(frozen=True)
class Bounds:
    """An interval of numbers, and what to do about one outside it."""

    ge: float = -inf
    gt: float = -inf
    le: float = inf
    lt: float = inf
    remedy: str = ""

    def __contains__(self, value: float) -> bool:
        return self.ge <= value <= self.le and self.gt < value < self.lt

    def __str__(self) -> str:
        """``must be at least 1``, ``must be in [0, 1); 0 turns it off``."""
        low, high = max(self.ge, self.gt), min(self.le, self.lt)
        if self.ge > -inf and self.le < inf:
            wording = f"must be between {low} and {high}"
        elif high < inf:
            left, right = "[" if self.ge > -inf else "(", "]" if self.le < inf else ")"
            wording = f"must be in {left}{low}, {high}{right}"
        elif self.gt > -inf:
            wording = "must be positive" if low == 0 else f"must be above {low}"
        else:
            wording = "must not be negative" if low == 0 else f"must be at least {low}"
        return f"{wording}{self.remedy}"


def flag(
    default: Any,
    help: str,
    *,
    ge: float = -inf,
    gt: float = -inf,
    le: float = inf,
    lt: float = inf,
    remedy: str = "",
    short: bool = False,
    **metadata: Any,
) -> Any:
    """A dataclass field with a help text; a list default is copied per instance.

    Args:
        ge, gt, le, lt: bounds of a number, which may equal ``ge`` and ``le``.
        remedy: ends the message about a number out of bounds.
        short: whether ``--help`` shows the flag; ``--help all`` shows every one.
        metadata: what argparse takes; ``form`` ends the message about a value of another type;
            ``needs``, a flag without which this one has no effect;
            ``reads`` is "files" where the value names local files, whose contents count;
            ``read_once``: how to change it once a trainer is made, which then has its own.
    """
    metadata |= {"help": help, "short": short, "bounds": Bounds(ge, gt, le, lt, remedy)}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


# Flags that change no result, but for rounding: how fast it comes, what is logged and when a run
# gives up, where it is.
speed_flag = functools.partial(flag, affects="speed")
log_flag = functools.partial(flag, affects="log")
place_flag = functools.partial(flag, affects="place")


@dataclass
class Named:
    """Knows which fields its call named, and refuses names that are no fields. A copy knows it too,
    and what `dataclasses.replace` makes: that passes what it changes, ``_named``, then the rest.
    """

    _named: InitVar[tuple[str, ...]] = field(default=(), kw_only=True)  # NOTE before all fields

    def __new__(cls, *_: Any, **given: Any) -> Any:
        names, called = [f.name for f in fields(cls)], list(given)
        require_known(given, [*names, "_named"], cls.__name__, "setting")
        config: Any = super().__new__(cls)
        if "_named" in given:
            called = [*given["_named"], *called[: called.index("_named")]]
        config._named = tuple(called) if len(called) < len(names) else ()  # all: of `asdict`
        return config


def changed(config: Any) -> dict[str, Any]:
    """The fields of a config that its call named, or that differ from their defaults."""
    defaults = asdict(type(config)())
    return {n: v for n, v in asdict(config).items() if n in config._named or v != defaults[n]}


def of_result(config_class: type, *settings: Mapping[str, Any]) -> set[str]:
    """Names of the flags that the result of a command depends on, but for rounding; with
    ``settings`` only the flags that one of them uses.
    """

    def is_used(needs: str | None) -> bool:
        return needs is None or not settings or any(values.get(needs) for values in settings)

    counted = [f for f in fields(config_class) if f.metadata.get("affects", "result") == "result"]
    return {f.name for f in counted if is_used(f.metadata.get("needs"))}


def fixed_or_zero(value: int | str) -> int:
    """An `IntOrAuto` flag's number; 0 where the program has yet to choose."""
    return 0 if value == AUTO else int(value)


def require_valid(config: Any, prefix: str = "--") -> None:
    """Raise ``UserError`` for the first dataclass field whose value does not match its type, then
    for the first with a number outside its bounds.

    The command line converts types; Python code and YAML files do not. Integers must fit in
    64 bits, floats lie within +-``LARGEST``.
    """
    config_class: type = type(config)
    hints = _hints(config_class)
    for f in fields(config):
        value = getattr(config, f.name)
        problem = type_problem(value, hints[f.name])
        if problem:
            shown = repr(value) if len(repr(value)) <= 80 else f"{repr(value)[:77]}..."
            raise UserError(f"{prefix}{f.name} {shown} {problem}{f.metadata.get('form', '')}")
    for f in fields(config):
        bounds, value = f.metadata.get("bounds"), getattr(config, f.name)
        for number in value if isinstance(value, (list, tuple)) else [value]:
            if bounds and isinstance(number, Real) and number not in bounds:
                raise UserError(f"{prefix}{f.name} {number} {bounds}")


_hints = functools.cache(get_type_hints)


def type_problem(value: Any, hint: Any) -> str:
    """Why ``value`` is not a ``hint``, in a few words; empty if it is one."""
    kind, choices = get_origin(hint), get_args(hint)
    if hint == IntOrAuto:
        is_int = isinstance(value, Integral) and not isinstance(value, bool)
        return "" if value == AUTO else type_problem(value, int) if is_int else _NOT_INT_OR_AUTO
    if kind is Union:  # of a type and None, or of names and the user's code
        is_code = str in choices and isinstance(value, str) and ":" in value
        is_none = type(None) in choices and value is None
        return "" if is_none or is_code else type_problem(value, choices[0])
    if kind is Literal:
        known = isinstance(value, str) and value in choices
        return "" if known else f"is not one of {', '.join(map(str, choices))}"
    if kind in (list, tuple):
        return _list_problem(value, choices[0], may_be_empty=kind is tuple)
    if dict in (kind, hint):
        return _dict_problem(value)
    if hint is bool:
        return "" if isinstance(value, bool) else "is neither true nor false"
    if hint is int:
        if not isinstance(value, Integral) or isinstance(value, bool):
            is_share = re.fullmatch(r"0?\.\d*[1-9]\d*", str(value))
            return "is not a whole number" + "; give the number, not a share" * bool(is_share)
        return "" if -(2**63) <= int(value) < 2**63 else "is too large a number"
    if hint is float:
        if not isinstance(value, Real) or isinstance(value, bool):
            return "is not a number"
        if value != value or abs(value) == inf:
            return "is not a finite number"
        if value < -LARGEST or not value <= LARGEST:
            return f"is out of range; it must be between -{LARGEST:.0f} and {LARGEST:.0f}"
        # Read back from a flag it would be a float, and a different number.
        is_exact = not isinstance(value, Integral) or float(value) == value
        return "" if is_exact else "has more digits than a float"
    if not isinstance(value, (str, os.PathLike)):
        return "is not text"
    if str(value) == "--":  # the end of flags on a command line
        return "is not a name"
    return "has a null character" if "\0" in str(value) else ""


def _dict_problem(value: Any) -> str:
    if not isinstance(value, dict):
        return "is not of the form {key: value}"
    try:
        is_json = json.loads(json.dumps(value)) == value
    except (TypeError, ValueError, RecursionError):
        is_json = False
    return "" if is_json else "has a key or value that JSON does not have; make it text, in quotes"


def _list_problem(value: Any, hint: Any, may_be_empty: bool) -> str:
    if not isinstance(value, (list, tuple)):
        return "is not a list"
    if not value and not may_be_empty:
        return "is empty; leave it out, or give at least one item"
    for item in value:
        problem = type_problem(item, hint)
        if problem:
            return f"has an item that {problem}"
        if hint is str and str(item).startswith("-"):
            return f"has {item}, which looks like a flag; write a file name as ./{item}"
    return ""


def read_named(path: str | Path, where: str, kind: str) -> str:
    """The text of a file that a user names. Raises ``UserError``, of which ``where`` is the start
    and ``kind`` (a JSON file) the remedy, where it cannot be read.
    """
    try:
        return read_text(path)
    except OSError as error:
        raise UserError(f"{where}: {error.strerror or error}; check the path") from None
    except UnicodeDecodeError:
        raise UserError(f"{where}: not a UTF-8 text file; name {kind}") from None


def read_text(path: str | Path) -> str:
    """The text of a UTF-8 file; ``~`` is the home folder.

    Raises:
        OSError: the file cannot be read, or is a pipe or a device, which may block forever.
        UnicodeDecodeError: the file is not UTF-8.
    """
    path = Path(os.path.expanduser(path))  # Path.expanduser raises for ~nobody
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "a pipe or a device, not a file")
    return path.read_text(encoding="utf-8")
