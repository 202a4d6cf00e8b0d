"""Calling a reward function: the arguments it asks for, and what its result means.

A function and samples come in; one value a sample goes out, or a `Fault` that says in one line what
went wrong. It must not know where functions come from or run, nor torch.
"""

import inspect
import math
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

from dschat.config import UserError
from dschat.rewards.samples import Samples

# A score, one a token, or None: not this function's sample.
Value = float | list[float] | None

# What a function may ask for by name -> the field of `Samples`; TRL's names beside ours.
GIVEN = {
    "prompts": "prompts",
    "answers": "answers",
    "completions": "answers",
    "prompt_ids": "prompt_ids",
    "answer_ids": "answer_ids",
    "completion_ids": "answer_ids",
    "finish_reasons": "finish_reasons",
}
# Where the right answer stands: `reference` is the first of these columns that the rows have.
REFERENCE = ("reference", "solution", "answer", "target", "ground_truth")
LONGEST_CALL_S = 1800.0  # where a function has limits of its own; ranks wait an hour for each other
_LARGEST = 3.4e38  # of a float of 32 bits
_SHOWN = 200  # characters of a message


class Fault(Exception):
    """What went wrong in a call. ``row``: the sample that did it, where that is known."""

    def __init__(self, what: str, row: int | None = None, timed_out: bool = False) -> None:
        super().__init__(what, row, timed_out)
        self.what = what
        self.row = row
        self.timed_out = timed_out


class MissingColumn(Fault):
    """The samples lack a column that the function needs: no sample's fault."""


def parameters(function: Callable) -> dict[str, inspect.Parameter]:
    """The parameters of ``function`` by name.

    Raises:
        UserError: they cannot be read, or one of them has no name to give it by.
    """
    try:
        found = inspect.signature(function).parameters
    except (TypeError, ValueError):
        raise UserError("has parameters that cannot be read; wrap it in a def") from None
    for name, parameter in found.items():
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            raise UserError(f"takes {name} by position; reward functions are called with names")
    return dict(found)


def sources_of(
    function: Callable,
    bound: Collection[str],
    mapped: Mapping[str, str],
    columns: Collection[str],
) -> dict[str, str]:
    """What ``function`` is called with: its parameter -> the column or the name in `GIVEN`.

    Args:
        bound: parameters that have their argument already.
        mapped: parameter -> column, where the user said which.
        columns: of the rows.

    Raises:
        UserError: it needs a column that there is not.
    """
    chosen: dict[str, str] = {}
    for name, parameter in parameters(function).items():
        if parameter.kind is parameter.VAR_POSITIONAL or name in bound:
            continue
        if parameter.kind is parameter.VAR_KEYWORD:
            rest = [c for c in (*GIVEN, *columns) if c not in chosen and c not in bound]
            chosen |= {c: c for c in rest}
            continue
        candidates = [name, *(REFERENCE if name == "reference" else ())]
        if name in mapped:
            candidates = [mapped[name]]
        found = next((c for c in candidates if c in columns or c in GIVEN), None)
        if found is not None:
            chosen[name] = found
        elif name in mapped or parameter.default is parameter.empty:
            there = ", ".join(sorted(columns)) or "none"
            raise UserError(
                f"needs the column {' or '.join(candidates)}, which the data lacks "
                f"(it has: {there}); give {name} a default, or name the column with "
                f"--reward_args NAME.{name}=@COLUMN"
            )
    return chosen


def arguments(sources: Mapping[str, str], samples: Samples) -> dict[str, list[Any]]:
    """The keyword arguments of a call, by what `sources_of` chose."""
    return {
        name: getattr(samples, GIVEN[source]) if source in GIVEN else samples.columns[source]
        for name, source in sources.items()
    }


def call(function: Callable, kwargs: Mapping[str, Any], lengths: list[int]) -> list[Value | Fault]:
    """One value for each sample, from one call; a fault stands where a value makes no sense.

    ``lengths``: the tokens of each answer.

    Raises:
        Fault: the call failed as a whole.
    """
    try:
        return values_of(function(**kwargs), lengths)
    except Fault:
        raise
    # NOTE everything: it is not our code, and SystemExit in a thread would be lost in silence.
    # Ctrl-C reaches the main thread, which never runs this.
    except BaseException as error:
        raise Fault(raised(error)) from None


async def call_async(
    function: Callable[..., Awaitable[Any]], kwargs: Mapping[str, Any], lengths: list[int]
) -> list[Value | Fault]:
    """`call` for a function that is declared with ``async def``."""
    try:
        return values_of(await function(**kwargs), lengths)
    except Fault:
        raise
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        raise Fault(raised(error)) from None


def raised(error: BaseException) -> str:
    """An exception in a line."""
    if isinstance(error, SystemExit):
        return f"called sys.exit({error.code!r:.40})"
    try:
        message = " ".join(str(error).split())
    except Exception:
        message = ""
    if "signal only works in main thread" in message:
        message = "it uses signals, which only work in a process: pass --reward_pool process"
    name = type(error).__name__
    return f"raised {name}: {shortened(message, _SHOWN)}" if message else f"raised {name}"


def values_of(result: Any, lengths: list[int]) -> list[Value | Fault]:
    """A function's result as one value a sample; lists, tuples, arrays and tensors all do.

    Raises:
        Fault: it is none of these, or has another number of values than there are samples.
    """
    if inspect.iscoroutine(result):
        result.close()
        raise Fault("returned a coroutine; declare the function with async def")
    values = _listed(result)
    if values is None:
        raise Fault(f"returned {_kind(result)}, not a list with a number for every sample")
    if len(values) != len(lengths):
        raise Fault(f"returned {len(values)} values for {len(lengths)} samples")
    return [_value(*row) for row in zip(range(len(values)), values, lengths, strict=True)]


def _value(row: int, value: Any, length: int) -> Value | Fault:
    if value is None:
        return None
    tokens = _listed(value)
    if tokens is None:
        number = _number(value)
        return Fault(f"returned {number}", row) if isinstance(number, str) else number
    if len(tokens) != length:
        return Fault(f"returned {len(tokens)} values for an answer of {length} tokens", row)
    numbers = [_number(token) for token in tokens]
    bad = next((number for number in numbers if isinstance(number, str)), None)
    return Fault(f"returned {bad} for a token", row) if bad else numbers


def _number(value: Any) -> float | str:
    """A finite float, or words for what is none."""
    if isinstance(value, (str, bytes)):
        return f"{_kind(value)}, not a number"
    try:
        number = float(value)
    except OverflowError:
        return "a number that is too large"
    except Exception:
        return f"{_kind(value)}, not a number"
    if not math.isfinite(number):
        return str(number)
    return number if abs(number) <= _LARGEST else f"{number:g}, which is too large"


def _listed(value: Any) -> list[Any] | None:
    """A list of what is in ``value``; None where it is one value, or no sequence."""
    if hasattr(value, "tolist"):  # NumPy's arrays and scalars, torch's tensors
        value = value.tolist()
    return list(value) if isinstance(value, (list, tuple)) else None


def _kind(value: Any) -> str:
    if isinstance(value, (str, bytes, bool, int, float)) or value is None:
        return f"{shortened(repr(value), 40)}"
    return f"a {type(value).__name__}"


def shortened(text: str, limit: int) -> str:
    """``text``, its middle left out where it is longer than ``limit`` characters."""
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2 - 2]} ... {text[len(text) - limit // 2 + 3 :]}"
