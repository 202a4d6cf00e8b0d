"""Calls a reward function: selects its arguments and validates its result.

One value per sample, or a `Fault` with a one-line message. No torch here: worker processes import
this module and should start fast.
"""

import inspect
import math
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

from dschat.config import UserError
from dschat.rewards.samples import Samples

# One score, one per token, or None: the function does not score this sample.
Value = float | list[float] | None

# Parameter name -> field of `Samples`. TRL's names work too.
GIVEN = {
    "prompts": "prompts",
    "answers": "answers",
    "completions": "answers",
    "prompt_ids": "prompt_ids",
    "answer_ids": "answer_ids",
    "completion_ids": "answer_ids",
    "finish_reasons": "finish_reasons",
}
# `reference` is the first of these columns that the rows have.
REFERENCE = ("reference", "solution", "answer", "target", "ground_truth")
LONGEST_CALL_S = 1800.0  # for functions with their own limits; collectives time out after an hour
_LARGEST = 3.4e38  # of fp32
_SHOWN = 200  # characters of a message


class Fault(Exception):
    """A failed call, or in a list of values the failure of a sample.

    A call that failed as a whole is the same fault in the place of each of its samples.
    """

    def __init__(self, problem: str, timed_out: bool = False) -> None:
        super().__init__(problem, timed_out)
        self.problem = problem
        self.timed_out = timed_out


Values = list[Value | Fault]  # (S,)


def timed_out(limit_s: float) -> Fault:
    """The fault of a call that reached its limit."""
    return Fault(f"did not return within {limit_s:.3g} s", timed_out=True)


class MissingColumn(Fault):
    """The samples lack a column that the function needs; retrying single samples cannot help."""


def parameters(function: Callable) -> dict[str, inspect.Parameter]:
    """The parameters of ``function`` by name.

    Raises:
        UserError: no readable signature, or a required parameter is positional-only.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        raise UserError("has no readable signature; wrap it in a def") from None
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            raise UserError(f"takes {name} by position; reward functions get keyword arguments")
    return dict(signature.parameters)


def sources_of(
    accepted: Mapping[str, inspect.Parameter],
    bound: Collection[str],
    mapped: Mapping[str, str],
    columns: Collection[str],
) -> dict[str, str]:
    """The source of each argument: parameter -> column, or name in `GIVEN`.

    Args:
        accepted: the function's `parameters`.
        bound: parameters whose argument is already set.
        mapped: parameter -> column, from ``--reward_args NAME.PARAMETER=@COLUMN``.
        columns: of the rows.

    Raises:
        UserError: the rows lack a column that the function needs.
    """
    chosen: dict[str, str] = {}
    for name, parameter in accepted.items():
        if parameter.kind is parameter.VAR_POSITIONAL or name in bound:
            continue
        if parameter.kind is parameter.VAR_KEYWORD:
            rest = [c for c in (*GIVEN, *columns) if c not in chosen and c not in bound]
            chosen |= {c: c for c in rest}
            continue
        candidates = list(REFERENCE) if name == "reference" else [name]
        if name in mapped:
            candidates = [mapped[name]]
        source = next((c for c in candidates if c in columns or c in GIVEN), None)
        if source is not None:
            chosen[name] = source
        elif name in mapped or parameter.default is parameter.empty:
            available = ", ".join(sorted(columns)) or "none"
            raise UserError(
                f"needs the column {' or '.join(candidates)}, which the data lacks "
                f"(it has: {available}); give {name} a default, or name the column with "
                f"--reward_args NAME.{name}=@COLUMN"
            )
    return chosen


def arguments(sources: Mapping[str, str], samples: Samples) -> dict[str, list[Any]]:
    """The keyword arguments of a call, from the sources that `sources_of` chose."""
    return {
        name: getattr(samples, GIVEN[source]) if source in GIVEN else samples.columns[source]
        for name, source in sources.items()
    }


def call(function: Callable, kwargs: Mapping[str, Any], lengths: list[int]) -> Values:
    """One value per sample, from one call; a fault in place of each invalid value.

    ``lengths``: number of tokens of each answer.

    Raises:
        Fault: the call failed as a whole.
    """
    try:
        return values_of(function(**kwargs), lengths)
    except Fault:
        raise
    # NOTE BaseException: this is user code, and a thread would swallow SystemExit silently.
    # Ctrl-C reaches the main thread, which never runs this.
    except BaseException as error:
        raise Fault(raised(error)) from None


async def call_async(
    function: Callable[..., Awaitable[Any]], kwargs: Mapping[str, Any], lengths: list[int]
) -> Values:
    """`call` for a function declared with ``async def``."""
    try:
        return values_of(await function(**kwargs), lengths)
    except Fault:
        raise
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        raise Fault(raised(error)) from None


def raised(error: BaseException) -> str:
    """An exception as one line."""
    if isinstance(error, SystemExit):
        return f"called sys.exit({error.code!r:.40})"
    try:
        message = " ".join(str(error).split())
    except Exception:
        message = ""
    if "signal only works in main thread" in message:
        message = "it uses signals, which work in a process only: pass --reward_pool process"
    name = type(error).__name__
    return f"raised {name}: {shortened(message, _SHOWN)}" if message else f"raised {name}"


def values_of(result: Any, lengths: list[int]) -> Values:
    """A function's result as one value per sample. Accepts lists, tuples, arrays and tensors.

    Raises:
        Fault: another type, or a length other than the number of samples.
    """
    if inspect.iscoroutine(result):
        result.close()
        raise Fault("returned a coroutine; declare the function with async def")
    values = _listed(result)
    if values is None:
        raise Fault(f"returned {_kind(result)}, not a list with one number per sample")
    if len(values) != len(lengths):
        raise Fault(f"returned {len(values)} values for {len(lengths)} samples")
    return [_value(value, length) for value, length in zip(values, lengths, strict=True)]


def _value(value: Any, length: int) -> Value | Fault:
    if value is None:
        return None
    tokens = _listed(value)
    try:
        if tokens is None:
            return _number(value)
        if len(tokens) != length:
            raise Fault(f"returned {len(tokens)} values for an answer of {length} tokens")
        return [_number(token, " for a token") for token in tokens]
    except Fault as fault:
        return fault


def _number(value: Any, of: str = "") -> float:
    """A finite float.

    Raises:
        Fault: it is something else. ``of`` ends the message.
    """
    try:
        number = None if isinstance(value, (str, bytes)) else float(value)
    except OverflowError:
        raise Fault(f"returned a number that is too large{of}") from None
    except Exception:
        number = None
    if number is None:
        raise Fault(f"returned {_kind(value)}, not a number{of}")
    if not math.isfinite(number):
        raise Fault(f"returned {number}{of}")
    if abs(number) > _LARGEST:
        raise Fault(f"returned {number:g}, which is too large{of}")
    return number


def _listed(value: Any) -> list[Any] | None:
    """The elements of a sequence, array or tensor; None for a scalar or any other type."""
    if hasattr(value, "tolist"):  # NumPy arrays and scalars, torch tensors
        value = value.tolist()
    return list(value) if isinstance(value, (list, tuple)) else None


def _kind(value: Any) -> str:
    if isinstance(value, (str, bytes, bool, int, float)) or value is None:
        return f"{shortened(repr(value), 40)}"
    return f"a {type(value).__name__}"


def shortened(text: str, limit: int) -> str:
    """``text``, with its middle cut out if it is longer than ``limit`` characters."""
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2 - 2]} ... {text[len(text) - limit // 2 + 3 :]}"
