"""Answers failed requests with OpenAI's error bodies."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from dschat.config import UserError
from dschat.serving.generation import EngineFailure
from dschat.serving.patience import ClientLeft, Ended, Overloaded, Stopping, TimedOut
from dschat.serving.responses import error_body

_RETRY_AFTER_S = 2
_CLIENT_LEFT = 499  # nginx's status; nobody reads it


def describe(error: Exception) -> tuple[int, dict[str, Any], Mapping[str, str]]:
    """Status, body and headers for an exception of a request."""
    if isinstance(error, RequestValidationError):
        return 400, _invalid(error), {}
    if isinstance(error, UserError):
        return 400, error_body(str(error), "invalid_request_error"), {}
    if isinstance(error, Overloaded):
        message = "too many requests wait; try again later"
        body = error_body(message, "rate_limit_error", "overloaded")
        return 429, body, {"Retry-After": str(_RETRY_AFTER_S)}
    if isinstance(error, TimedOut):
        return 504, error_body("the request took too long", "timeout_error"), {}
    if isinstance(error, Stopping):
        return 503, error_body("the server stops; ask again later", "server_error"), {}
    if isinstance(error, EngineFailure):
        return 500, error_body("the engine failed; see the server's log", "server_error"), {}
    if isinstance(error, ClientLeft):
        return _CLIENT_LEFT, {}, {}
    assert isinstance(error, HTTPException)
    code = "model_not_found" if error.status_code == 404 and "model" in error.detail else None
    return error.status_code, error_body(error.detail, "invalid_request_error", code), {}


def handle_errors(app: FastAPI) -> None:
    """Register `describe` for all exceptions that a request may cause."""

    async def respond(_: Request, error: Exception) -> JSONResponse:
        status, body, headers = describe(error)
        return JSONResponse(body, status, dict(headers))

    known = RequestValidationError, UserError, Overloaded, Ended, ClientLeft
    for kind in known:
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
