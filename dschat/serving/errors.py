"""Requests that fail or are given up: exceptions, OpenAI's bodies for them, and work that ends with
its client.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from dschat.config import UserError

T = TypeVar("T")


class Overloaded(Exception):
    """As many answers wait as the server allows."""


class Ended(Exception):
    """The server ends a request that has begun."""


class TimedOut(Ended):
    """A request took longer than the server allows."""


class Stopping(Ended):
    """The server stops."""


class ClientLeft(Exception):
    """Nobody reads the response."""


class EngineFailure(Ended):
    """A step of the engine failed; the server's log has the cause."""


# Status, OpenAI's type of error, and message
_OF_SERVER = {
    Overloaded: (429, "rate_limit_error", "too many requests wait; try again later"),
    TimedOut: (504, "timeout_error", "the request took too long"),
    Stopping: (503, "server_error", "the server stops; ask again later"),
    EngineFailure: (500, "server_error", "the engine failed; see the server's log"),
    ClientLeft: (499, "client_left", ""),  # nginx's status; nobody reads it
}


def describe(error: Exception) -> tuple[int, dict[str, Any], Mapping[str, str]]:
    """Status, body and headers for an exception of a request."""
    if isinstance(error, RequestValidationError):
        return 400, _invalid(error), {}
    if isinstance(error, UserError):
        return 400, error_body(str(error), "invalid_request_error"), {}
    if known := _OF_SERVER.get(type(error)):
        status, kind, message = known
        if status != 429:
            return status, error_body(message, kind), {}
        return status, error_body(message, kind, "overloaded"), {"Retry-After": "2"}
    assert isinstance(error, HTTPException)
    code = "model_not_found" if error.status_code == 404 and "model" in error.detail else None
    return error.status_code, error_body(error.detail, "invalid_request_error", code), {}


def handle_errors(app: FastAPI) -> None:
    """Register `describe` for all exceptions that a request may cause."""

    async def respond(_: Request, error: Exception) -> JSONResponse:
        status, body, headers = describe(error)
        return JSONResponse(body, status, dict(headers))

    for kind in (*_OF_SERVER, RequestValidationError, UserError):
        app.add_exception_handler(kind, respond)
    app.add_exception_handler(HTTPException, respond)


def _invalid(error: RequestValidationError) -> dict[str, Any]:
    """The first invalid field, by its name."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"] if part != "body")
    message = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "json_invalid":
        place, message = "", "the body is not JSON"
    text = f"{place}: {message}" if place else message
    return error_body(text, "invalid_request_error", param=place or None)


def error_body(message: str, kind: str, code: str | None = None, param: str | None = None) -> Any:
    """OpenAI's body of a failed request."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


# -- patience --------------------------------------------------------------------------------------


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
        self._num_waiting = 0

    async def run(self, request: Request, function: Callable[..., T], *args: Any) -> T:
        """The result of ``function``, which does not begin once the client has left.

        Raises:
            Overloaded: too many wait already.
            ClientLeft, TimedOut: before the result.
        """
        if self._num_waiting > self._max_waiting:
            raise Overloaded

        async def result() -> T:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, function, *args)

        self._num_waiting += 1
        try:
            return await while_connected(request, result(), self._timeout_s)
        finally:
            self._num_waiting -= 1

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
