"""Runs reward functions in threads, event loops and processes, each call with a time limit.

Python cannot stop a thread. One that exceeds its limit is abandoned: the run continues without it,
and it exits with the run. A function that computes in C without releasing the GIL (a huge power, a
catastrophic regular expression) blocks every thread of the process: it needs a worker process.

``begin`` runs first in each new thread that calls reward functions.
"""

import asyncio
import concurrent.futures
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

from dschat.rewards.call import Fault, Value, call, call_async
from dschat.rewards.worker import Worker

Values = list[Value | Fault]
_GRACE_S = 1.0  # for an event loop to cancel a call that reached its limit


def nothing() -> None:
    """The default of ``begin``."""


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

    def submit(self, job: Callable[..., Any], *args: Any) -> concurrent.futures.Future:
        """A future with the result of ``job(*args)``."""
        future: concurrent.futures.Future = concurrent.futures.Future()
        self._jobs.put((future, job, args))
        return future

    def close(self) -> None:
        for _ in range(self._num_threads):
            self._jobs.put(None)

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            _run_job(*item)


def at_once(job: Callable[..., Any], *args: Any) -> concurrent.futures.Future:
    """`Pool.submit` without a pool: runs the job before it returns."""
    future: concurrent.futures.Future = concurrent.futures.Future()
    future.set_result(job(*args))
    return future


def _run_job(future: concurrent.futures.Future, job: Callable[..., Any], args: tuple) -> None:
    try:
        future.set_result(job(*args))
    except BaseException as error:  # `future.result` raises it in the waiting thread
        future.set_exception(error)


def within(limit_s: float, job: Callable[..., Any], *args: Any) -> Any:
    """The result of ``job(*args)`` in a thread of its own; `TimeoutError` after ``limit_s``."""
    future: concurrent.futures.Future = concurrent.futures.Future()
    threading.Thread(target=_run_job, args=(future, job, args), daemon=True).start()
    if not concurrent.futures.wait([future], timeout=limit_s).done:
        raise TimeoutError
    return future.result()


def in_thread(
    function: Callable,
    kwargs: Mapping[str, Any],
    lengths: list[int],
    limit_s: float,
    begin: Callable[[], None] = nothing,
) -> Values:
    """`call` in a thread of its own, with a limit of ``limit_s``."""

    def job() -> Values:
        begin()
        return call(function, kwargs, lengths)

    try:
        return within(limit_s, job)
    except TimeoutError:
        raise _timed_out(limit_s) from None


class Processes:
    """Worker processes, one per concurrent call. Each holds all functions."""

    def __init__(self, recipes: list[tuple[Any, ...]], count: int) -> None:
        self._all = [Worker(recipes) for _ in range(count)]
        self._idle: queue.LifoQueue[Worker] = queue.LifoQueue()
        for worker in self._all:
            self._idle.put(worker)

    def call(
        self, number: int, kwargs: Mapping[str, Any], lengths: list[int], limit_s: float
    ) -> Values:
        """`Worker.call` on the next idle worker."""
        worker = self._idle.get()
        try:
            return worker.call(number, kwargs, lengths, limit_s)
        finally:
            self._idle.put(worker)

    def prepare(self) -> None:
        """Start the process that the next call uses."""
        worker = self._idle.get()
        try:
            worker.start()
        except Fault:
            pass  # the call reports it
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        for worker in self._all:
            worker.close()


class Loop:
    """An event loop in a thread, for the coroutines of one function.

    Its open connections serve every call. A function that blocks its loop delays no other one.
    """

    def __init__(self, begin: Callable[[], None] = nothing) -> None:
        self._begin = begin
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()

    def call(
        self, function: Callable, kwargs: Mapping[str, Any], lengths: list[int], limit_s: float
    ) -> Values:
        """`call_async` with a limit of ``limit_s``; blocks until it is done."""
        limited = self._limited(call_async(function, kwargs, lengths), limit_s)
        loop = self._running()
        future = asyncio.run_coroutine_threadsafe(limited, loop)
        if not concurrent.futures.wait([future], timeout=limit_s + _GRACE_S).done:
            with self._lock:
                if self._loop is loop:
                    self._loop = None  # abandoned with its thread
            raise Fault("blocks the event loop; await in it, or declare it with def", None, True)
        return future.result()

    @staticmethod
    async def _limited(values: Any, limit_s: float) -> Values:
        try:
            return await asyncio.wait_for(values, limit_s)
        except asyncio.TimeoutError:
            raise _timed_out(limit_s) from None

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._run, args=(self._loop,), daemon=True).start()
            return self._loop

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        self._begin()
        try:
            loop.run_forever()
        finally:
            loop.close()

    def close(self) -> None:
        with self._lock:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._loop = None


def _timed_out(limit_s: float) -> Fault:
    return Fault(f"did not return within {limit_s:.3g} s", timed_out=True)
