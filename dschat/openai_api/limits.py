"""Guards a server: API keys, origins, size and time of requests, number of connections."""

import asyncio
import resource
import secrets
import sys
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import httptools
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dschat.config import UserError
from dschat.data.rendering import render_chat
from dschat.data.sources.turns import Turn
from dschat.openai_api.responses import error_body

# Paths that need no key: they tell nothing of the models.
_OPEN_PATHS = ("/", "/health")
_DISCARDED_BYTES = 64 * 2**20  # of a body that is refused
_NUM_LARGEST = 32  # bodies of the largest size that all requests hold together
_SMALL_BYTES = 64 * 2**10  # a body of so many is taken all the same: a connection reads as much


class Guard:
    """ASGI middleware. Refuses requests without a key, of pages of other origins, and bodies that
    are no JSON, too large, too slow or too many.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: list[str],
        max_bytes: int,
        origins: Sequence[str] = (),
        body_timeout_s: float = 30.0,
    ) -> None:
        self._app, self._max_bytes, self._origins = app, max_bytes, origins
        self._body_timeout_s = body_timeout_s
        self._keys = [key.encode() for key in keys]
        self._held = 0  # bytes of all requests' bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        parts: list[bytes] = []  # of the body
        try:
            response = self._refusal(scope) or await self._read(receive, parts)
            if response is not None:
                await response(scope, receive, send)
                return
            parts[:] = [b"".join(parts)]
            messages = [{"type": "http.request", "body": parts[0], "more_body": False}]

            async def replay() -> Message:
                return messages.pop() if messages else await receive()

            await self._app(scope, replay, send)
        finally:
            self._held -= sum(map(len, parts))

    async def _read(self, receive: Receive, parts: list[bytes]) -> JSONResponse | None:
        """Read a request's body into ``parts``; the response to one that is refused. Its rest is
        read too, up to a limit: a client that still writes would not read the response.
        """
        refused, num_bytes, is_whole = None, 0, False
        end = time.monotonic() + self._body_timeout_s
        while not is_whole and num_bytes < self._max_bytes + _DISCARDED_BYTES:
            try:
                message = await asyncio.wait_for(receive(), end - time.monotonic())
            except asyncio.TimeoutError:
                late = f"the request's body did not arrive in {self._body_timeout_s:.0f} s"
                return _refuse(408, late)
            part, is_whole = message.get("body", b""), not message.get("more_body", False)
            num_bytes += len(part)
            if num_bytes > self._max_bytes:
                large = f"the request's body exceeds {self._max_bytes} bytes (--max_request_mib)"
                refused = _refuse(413, large)
            elif num_bytes > _SMALL_BYTES and self._held > _NUM_LARGEST * self._max_bytes:
                refused = _refuse(429, "too many large requests arrive; try again later")
            if refused is None:
                parts.append(part)
                self._held += len(part)
        return refused

    def _refusal(self, scope: Scope) -> JSONResponse | None:
        headers = dict(scope["headers"])
        host, origin = (headers.get(name, b"").decode("latin-1") for name in (b"host", b"origin"))
        if not self._may_enter(scope, headers.get(b"authorization", b"")):
            body = error_body("the API key is missing or wrong", "authentication_error")
            return JSONResponse(body, 401, {"WWW-Authenticate": "Bearer"})
        # What a browser sends for a page of another origin without asking the server first.
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if scope["method"] == "POST" and kind != b"application/json":
            return _refuse(415, "the request's Content-Type is not application/json")
        try:
            is_own = urlsplit(origin).netloc == host
        except ValueError:
            return _refuse(400, "the request's Origin is no address")
        if origin and not is_own and not {origin, "*"} & set(self._origins):
            return _refuse(403, f"pages of {origin:.100} may not send requests (--allow_origin)")
        return None

    def _may_enter(self, scope: Scope, authorization: bytes) -> bool:
        if not self._keys or scope["path"] in _OPEN_PATHS:
            return True
        kind, _, key = authorization.partition(b" ")
        is_known = [secrets.compare_digest(key.strip(), known) for known in self._keys]
        return kind.lower() == b"bearer" and any(is_known)


class BoundedConnection(HttpToolsProtocol):
    """Ends connections whose headers do not arrive, and those beyond what the process may open.
    Answers requests that offer another protocol, as Java's clients do (h2c), by HTTP/1.1.
    """

    header_timeout_s = 10.0
    header_bytes = 64 * 2**10
    max_connections = 4096
    _deadline: asyncio.TimerHandle | None = None  # of the next headers

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if len(self.connections) > min(self.max_connections, num_files * 3 // 4):
            transport.abort()
        self.data_received(b"")

    def data_received(self, data: bytes) -> None:
        if self._deadline is None and (self.cycle is None or self.cycle.response_complete):
            self._deadline = self.loop.call_later(self.header_timeout_s, self.transport.abort)
            self._num_bytes = 0
        self._data = data
        super().data_received(data)
        self._data = b""
        self._num_bytes += len(data)
        if self._deadline is not None and self._num_bytes > self.header_bytes:
            self.transport.abort()

    def on_headers_complete(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        super().on_headers_complete()

    def _should_upgrade(self) -> bool:
        return self._get_upgrade() is not None and self.scope["http_version"] == "1.1"

    def handle_websocket_upgrade(self) -> None:
        """Read the request again without its offer, with which the parser skips the body."""
        error = sys.exc_info()[1]
        assert isinstance(error, httptools.HttpParserUpgrade)
        head = [f"{self.scope['method']} ".encode() + self.url + b" HTTP/1.1"]
        head += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        self.data_received(b"\r\n".join([*head, b"", self._data[error.args[0] :]]))


def require_short(
    model: str, encoder: Any, turns: list[Turn], room: int, num_new: int, /, **inputs: Any
) -> None:
    """Refuse a conversation that is far too long: rendering each answer in it takes much longer."""
    text = render_chat(encoder, turns, **inputs)
    part = text[: 16 * room]
    num_tokens = len(encoder.encode(part, add_special_tokens=False, verbose=False))
    if num_tokens > 2 * room:
        raise too_long(model, room, num_tokens * len(text) // len(part), num_new, "about ")


def too_long(model: str, room: int, num_tokens: int, num_new: int, about: str = "") -> UserError:
    """For who wrote the conversation, which may be in the web chat."""
    answer = f" and its answer may have {num_new:,}, which exceeds {room:,} in all" * bool(num_new)
    message = (
        f"too long for {model} by {about}{num_tokens + num_new - room:,} tokens: the conversation "
        f"has {about}{num_tokens:,}{answer}; shorten the message or delete earlier turns"
    )
    if num_tokens < room:
        message += f", or ask for an answer of at most {room - num_tokens:,} tokens"
    return UserError(message)


def _refuse(status: int, message: str) -> JSONResponse:
    body = error_body(message, "invalid_request_error")
    return JSONResponse(body, status, {"Connection": "close"})
