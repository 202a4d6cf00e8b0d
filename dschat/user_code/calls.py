"""Calls user code: whatever goes wrong becomes a `Fault` with a one-line message."""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

_SHOWN = 200  # characters of a message


class Fault(Exception):
    """A failed call. ``timed_out``: its thread may still work on it."""

    def __init__(self, problem: str, timed_out: bool = False) -> None:
        super().__init__(problem, timed_out)
        self.problem = problem
        self.timed_out = timed_out

    def __str__(self) -> str:
        return self.problem


def called(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The result of a function or coroutine; in a coroutine's place, what it returns.

    Raises:
        Fault: it raised.
    """
    try:
        result = function(*args, **kwargs)
        return asyncio.run(awaited(result)) if inspect.isawaitable(result) else result
    # NOTE BaseException: this is user code, and a thread would swallow SystemExit silently.
    # Ctrl-C reaches the main thread, which never runs this.
    except BaseException as error:
        raise fault_of(error) from None


async def awaited(result: Any) -> Any:
    """What an awaitable returns; any other value unchanged."""
    return await result if inspect.isawaitable(result) else result


def fault_of(error: BaseException) -> Fault:
    """``error`` itself if it is a fault; else one that says what was raised."""
    return error if isinstance(error, Fault) else Fault(raised(error))


def timed_out(limit_s: float) -> Fault:
    """The fault of a call that reached its limit."""
    return Fault(f"did not return within {limit_s:.3g} s", timed_out=True)


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


def shortened(text: str, limit: int) -> str:
    """``text``, with its middle cut out if it is longer than ``limit`` characters."""
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2 - 2]} ... {text[len(text) - limit // 2 + 3 :]}"
