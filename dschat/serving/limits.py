"""Guards the server: API keys, size and time of request bodies."""

import asyncio
import secrets

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dschat.serving.responses import error_body

# Paths that need no key: they tell nothing of the models.
_OPEN_PATHS = ("/", "/health")
_BODY_TIMEOUT_S = 30.0
_DISCARDED_BYTES = 64 * 2**20  # of a body too large


class Guard:
    """ASGI middleware. Refuses requests without a key, and bodies too large or too slow."""

    def __init__(self, app: ASGIApp, keys: list[str], max_bytes: int) -> None:
        self._app, self._max_bytes = app, max_bytes
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if not self._may_enter(scope, headers.get(b"authorization", b"")):
            body = error_body("the API key is missing or wrong", "authentication_error")
            response = JSONResponse(body, 401, {"WWW-Authenticate": "Bearer"})
            await response(scope, receive, send)
            return
        try:
            whole = await asyncio.wait_for(_read(receive, self._max_bytes), _BODY_TIMEOUT_S)
        except asyncio.TimeoutError:
            problem = f"the request's body did not arrive in {_BODY_TIMEOUT_S:.0f} s"
            await _refuse(408, problem)(scope, receive, send)
            return
        if whole is None:
            problem = f"the request's body exceeds {self._max_bytes} bytes (--max_request_mib)"
            await _refuse(413, problem)(scope, receive, send)
            return
        messages = [{"type": "http.request", "body": whole, "more_body": False}]

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        await self._app(scope, replay, send)

    def _may_enter(self, scope: Scope, authorization: bytes) -> bool:
        if not self._keys or scope["path"] in _OPEN_PATHS or scope["method"] == "OPTIONS":
            return True
        kind, _, key = authorization.partition(b" ")
        is_known = [secrets.compare_digest(key.strip(), known) for known in self._keys]
        return kind.lower() == b"bearer" and any(is_known)


def _refuse(status: int, message: str) -> JSONResponse:
    body = error_body(message, "invalid_request_error")
    return JSONResponse(body, status, {"Connection": "close"})


async def _read(receive: Receive, max_bytes: int) -> bytes | None:
    """A request's body. None: it has over ``max_bytes``; the rest is read too, up to a limit, as a
    client that still writes would not read the answer.
    """
    parts, num_bytes, is_whole = [], 0, False
    while not is_whole and num_bytes < max_bytes + _DISCARDED_BYTES:
        message = await receive()
        part = message.get("body", b"")
        num_bytes += len(part)
        if num_bytes <= max_bytes:
            parts.append(part)
        is_whole = not message.get("more_body", False)
    return b"".join(parts) if num_bytes <= max_bytes else None
