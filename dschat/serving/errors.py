"""Answers failed requests with OpenAI's error bodies."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from dschat.config import UserError
from dschat.serving.generation import EngineFailure
from dschat.serving.patience import ClientLeft, Overloaded, Stopping, TimedOut
from dschat.serving.responses import error_body

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
