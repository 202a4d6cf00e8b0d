"""Calls user code, in threads and event loops, each call with a time limit.

Whatever goes wrong becomes a `Fault` with a one-line message.

Python cannot stop a thread. One that exceeds its limit is abandoned: the run continues without it,
and it exits with the run. A function that computes in C without releasing the GIL (a huge power, a
catastrophic regular expression) blocks every thread of the process: it needs a worker process.
"""

import asyncio
import inspect
import queue
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
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


_GRACE_S = 1.0  # for an event loop to cancel a call that reached its limit


def at_once(job: Callable[..., Any], *args: Any) -> Future:
    """A future of ``job(*args)``, which runs before this returns."""
    future: Future = Future()
    future.set_result(job(*args))
    return future


def background(job: Callable[..., Any], *args: Any) -> Future:
    """A future of ``job(*args)``, which runs in a daemon thread of its own."""
    future: Future = Future()
    threading.Thread(target=settle, args=(future, job, *args), daemon=True).start()
    return future


def settle(future: Future, job: Callable[..., Any], *args: Any) -> None:
    """Give ``future`` the result or the exception of ``job(*args)``."""
    try:
        future.set_result(job(*args))
    except BaseException as error:  # `future.result` raises it in the waiting thread
        future.set_exception(error)


class Pool:
    """Daemon threads that run jobs in the order of submission.

    `concurrent.futures.ThreadPoolExecutor` joins its threads at exit, so a run interrupted with
    Ctrl-C would not exit.
    """

    def __init__(self, num_threads: int) -> None:
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._num_threads = num_threads
        for _ in range(num_threads):
            threading.Thread(target=self._work, daemon=True).start()

    def submit(self, job: Callable[..., Any], *args: Any) -> Future:
        """A future of ``job(*args)``."""
        future: Future = Future()
        self._jobs.put((future, job, *args))
        return future

    def close(self) -> None:
        """Stop the threads once they are idle, without waiting for them."""
        for _ in range(self._num_threads):
            self._jobs.put(None)

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            settle(*item)


def within(limit_s: float, job: Callable[..., Any], *args: Any) -> Any:
    """The result of ``job(*args)`` in a thread of its own.

    Raises:
        Fault: it did not return within ``limit_s``.
    """
    future = background(job, *args)
    if not wait([future], timeout=limit_s).done:
        raise timed_out(limit_s)
    return future.result()


class Loop:
    """An event loop in a thread. Its open connections serve every call."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()

    def run(self, coroutine: Coroutine[Any, Any, Any], limit_s: float) -> Any:
        """What ``coroutine`` returns; blocks until it is done.

        Raises:
            Fault: it was not done after ``limit_s``.
        """
        loop = self._running()
        future = asyncio.run_coroutine_threadsafe(asyncio.wait_for(coroutine, limit_s), loop)
        if not wait([future], timeout=limit_s + _GRACE_S).done:
            with self._lock:
                if self._loop is loop:
                    self._loop = None  # abandoned with its thread
            raise Fault("blocks the event loop; await in it, or declare it with def", True)
        try:
            return future.result()
        except asyncio.TimeoutError:
            raise timed_out(limit_s) from None

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                background(_run_loop, self._loop)
            return self._loop

    def close(self) -> None:
        with self._lock:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._loop = None


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()
