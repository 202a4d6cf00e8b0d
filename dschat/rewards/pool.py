"""Where reward functions run: threads and processes, each call within its time limit.

Calls come in; their values come out, or a `Fault`. It must not know what a call is about, nor what
a thread that runs functions does first: whoever has it made gives that as ``begin``.

A thread cannot be stopped. One that overruns is given up: the run goes on without it, and it ends
with the run. Python runs one thread at a time, so a function that computes for long in C without
letting go (a huge power, a wild regular expression) still stops everything: it needs a process.
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
_GRACE_S = 1.0  # what an event loop may take to notice a time limit


def nothing() -> None:
    """For ``begin``, where a thread has nothing to do first."""


class Pool:
    """Daemon threads that carry out jobs in their order.

    Not `concurrent.futures`' own: its threads keep a run that Ctrl-C ends from ending.
    """

    def __init__(self, num_threads: int) -> None:
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._num_threads = num_threads
        for _ in range(num_threads):
            threading.Thread(target=self._work, daemon=True).start()

    def submit(self, job: Callable[..., Any], *args: Any) -> concurrent.futures.Future:
        """The result of ``job(*args)``, later."""
        future: concurrent.futures.Future = concurrent.futures.Future()
        self._jobs.put((future, job, args))
        return future

    def close(self) -> None:
        for _ in range(self._num_threads):
            self._jobs.put(None)

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            _carry_out(*item)


def at_once(job: Callable[..., Any], *args: Any) -> concurrent.futures.Future:
    """`Pool.submit` without a pool: the job is done when this returns."""
    future: concurrent.futures.Future = concurrent.futures.Future()
    future.set_result(job(*args))
    return future


def _carry_out(future: concurrent.futures.Future, job: Callable[..., Any], args: tuple) -> None:
    try:
        future.set_result(job(*args))
    except BaseException as error:  # whoever waits for the result gets it
        future.set_exception(error)


def within(limit_s: float, job: Callable[..., Any], *args: Any) -> Any:
    """The result of ``job(*args)`` in a thread of its own; `TimeoutError` after ``limit_s``."""
    future: concurrent.futures.Future = concurrent.futures.Future()
    threading.Thread(target=_carry_out, args=(future, job, args), daemon=True).start()
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
    """`call` in a thread of its own, for at most ``limit_s``."""

    def begun() -> Values:
        begin()
        return call(function, kwargs, lengths)

    try:
        return within(limit_s, begun)
    except TimeoutError:
        raise _overran(limit_s) from None


class Processes:
    """As many worker processes as calls at a time; all know all functions."""

    def __init__(self, recipes: list[tuple[Any, ...]], count: int) -> None:
        self._all = [Worker(recipes) for _ in range(count)]
        self._idle: queue.LifoQueue[Worker] = queue.LifoQueue()
        for worker in self._all:
            self._idle.put(worker)

    def call(
        self, number: int, kwargs: Mapping[str, Any], lengths: list[int], limit_s: float
    ) -> Values:
        """`Worker.call` by the next one that is idle."""
        worker = self._idle.get()
        try:
            return worker.call(number, kwargs, lengths, limit_s)
        finally:
            self._idle.put(worker)

    def ready(self) -> None:
        """Let the next call find a process that has started."""
        worker = self._idle.get()
        try:
            worker.start()
        except Fault:
            pass  # the call will say it
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        for worker in self._all:
            worker.close()


class Loop:
    """An event loop in a thread, for the coroutines of one function: what it keeps open serves
    every call, and where it blocks the loop nobody else is held up, or blamed.
    """

    def __init__(self, begin: Callable[[], None] = nothing) -> None:
        self._begin = begin
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()

    def call(
        self, function: Callable, kwargs: Mapping[str, Any], lengths: list[int], limit_s: float
    ) -> Values:
        """`call_async`, for at most ``limit_s``; waits for it."""
        limited = self._limited(call_async(function, kwargs, lengths), limit_s)
        loop = self._running()
        future = asyncio.run_coroutine_threadsafe(limited, loop)
        if not concurrent.futures.wait([future], timeout=limit_s + _GRACE_S).done:
            with self._lock:
                if self._loop is loop:
                    self._loop = None  # given up, as a thread is
            raise Fault("blocks the event loop; await in it, or declare it with def", None, True)
        return future.result()

    @staticmethod
    async def _limited(values: Any, limit_s: float) -> Values:
        try:
            return await asyncio.wait_for(values, limit_s)
        except asyncio.TimeoutError:
            raise _overran(limit_s) from None

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._run, args=(self._loop,), daemon=True).start()
            return self._loop

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        self._begin()
        loop.run_forever()

    def close(self) -> None:
        with self._lock:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._loop = None


def _overran(limit_s: float) -> Fault:
    return Fault(f"did not return within {limit_s:.3g} s", timed_out=True)
