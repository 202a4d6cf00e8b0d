"""Calls reward functions and validates what they return: one value per sample, or a `Fault`.

No torch here: worker processes import this module and should start fast.
"""

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from dschat.rewards.conventions import adapted
from dschat.user_code.calls import Fault, Recipe, fault_of, rebuilt, shortened

# Of a sample: one score, one per token, None where the function does not score it, or the fault. A
# call that failed as a whole is the same fault for all its samples.
Value = float | list[float] | Fault | None

LONGEST_CALL_S = 1800.0  # for functions with their own limits; collectives time out after an hour
_LARGEST = 3.4e38  # of fp32


class MissingColumn(Fault):
    """The samples lack a column that the function needs; retrying single samples cannot help."""


def call(function: Callable, kwargs: Mapping[str, Any], lengths: list[int]) -> list[Value]:
    """One value per sample, from one call; a fault in place of each invalid value.

    ``lengths``: number of tokens of each answer.

    Raises:
        Fault: the call failed as a whole.
    """
    try:
        return values_of(function(**kwargs), lengths)
    # NOTE BaseException: this is user code, and a thread would swallow SystemExit silently.
    # Ctrl-C reaches the main thread, which never runs this.
    except BaseException as error:
        raise fault_of(error) from None


async def call_async(
    function: Callable[..., Awaitable[Any]], kwargs: Mapping[str, Any], lengths: list[int]
) -> list[Value]:
    """`call` for a function declared with ``async def``."""
    try:
        return values_of(await function(**kwargs), lengths)
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        raise fault_of(error) from None


def served(recipes: Sequence[tuple[Recipe, dict[str, Any]]]) -> Callable[..., list[Value]]:
    """What worker processes serve: calls of functions by number. ``recipes``: of each function,
    with the arguments of its constructor.
    """
    functions = [rebuilt_function(*recipe) for recipe in recipes]
    return lambda number, kwargs, lengths: call(functions[number], kwargs, lengths)


def rebuilt_function(recipe: Recipe, settings: dict[str, Any]) -> Callable[..., Any]:
    """The function of a recipe, or an instance of its class."""
    target = rebuilt(recipe)
    if isinstance(target, type):
        return adapted(target(**settings))[0]
    return adapted(target, settings)[0]


def values_of(result: Any, lengths: list[int]) -> list[Value]:
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


def _value(value: Any, length: int) -> Value:
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
    """A finite float. Raises ``Fault``, whose message ``of`` ends, for anything else."""
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
