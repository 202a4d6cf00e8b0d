"""Runs calls of user code in threads and event loops, each with a time limit.

Python cannot stop a thread. One that exceeds its limit is abandoned: the run continues without it,
and it exits with the run. A function that computes in C without releasing the GIL (a huge power, a
catastrophic regular expression) blocks every thread of the process: it needs a worker process.
"""

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from typing import Any

from dschat.user_code.calls import Fault, timed_out

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
