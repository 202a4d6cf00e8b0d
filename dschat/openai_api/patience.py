"""Does work for clients that wait for it: not for those that have left, and for so many at most."""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fastapi import Request

T = TypeVar("T")


class Overloaded(Exception):
    """As many answers wait as the server allows."""


class Ended(Exception):
    """The server ends a request that has begun."""


class TimedOut(Ended):
    """A request took longer than the server allows."""


class Stopping(Ended):
    """The server stops."""


class EngineFailure(Ended):
    """A step of the engine failed; the server's log has the cause."""


class ClientLeft(Exception):
    """Nobody reads the response."""


async def while_connected(
    request: Request, work: Coroutine[Any, Any, T], timeout_s: float | None = None
) -> T:
    """The result of ``work``, which is cancelled when the client leaves.

    Raises:
        ClientLeft, TimedOut: before the work was done.
    """
    working, leaving = asyncio.create_task(work), asyncio.create_task(_disconnected(request))
    both = {working, leaving}
    try:
        await asyncio.wait(both, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientLeft if leaving.done() else TimedOut
    finally:
        leaving.cancel()
        working.cancel()


class PatientThread:
    """One thread, in which functions of clients that wait run one after the other."""

    def __init__(self, max_waiting: int, timeout_s: float) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._max_waiting, self._timeout_s = max_waiting, timeout_s
        self.num_waiting = 0

    async def run(self, request: Request, function: Callable[..., T], *args: Any) -> T:
        """The result of ``function``, which does not begin once the client has left.

        Raises:
            Overloaded: too many wait already.
            ClientLeft, TimedOut: before the result.
        """
        if self.num_waiting > self._max_waiting:
            raise Overloaded

        async def result() -> T:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, function, *args)

        self.num_waiting += 1
        try:
            return await while_connected(request, result(), self._timeout_s)
        finally:
            self.num_waiting -= 1

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
