"""Guards the server: API keys, size and time of request bodies."""

import asyncio
import secrets

from starlette.responses import JSONResponse

from dschat.serving.asgi import App, Message, Receive, Send
from dschat.serving.responses import error_body

# Paths that need no key: they tell nothing of the models.
_OPEN_PATHS = ("/", "/health")
_BODY_TIMEOUT_S = 30.0


class TooLarge(Exception):
    """A request's body is larger than allowed."""


class TooSlow(Exception):
    """A request's body did not arrive in time."""


class Guard:
    """ASGI middleware. Refuses requests without a key, and bodies too large or too slow."""

    def __init__(self, app: App, keys: list[str], max_bytes: int) -> None:
        self._app, self._max_bytes = app, max_bytes
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        response = None
        if not self._may_enter(scope, headers.get(b"authorization", b"")):
            body = error_body("the API key is missing or wrong", "authentication_error")
            response = JSONResponse(body, 401, {"WWW-Authenticate": "Bearer"})
        elif int(headers.get(b"content-length", b"0") or 0) > self._max_bytes:
            response = self._too_large()
        if response is not None:
            await response(scope, receive, send)
            return
        has_answered = False

        async def send_once(message: Message) -> None:
            nonlocal has_answered
            has_answered = True
            await send(message)

        try:
            await self._app(scope, self._limited(receive), send_once)
        except (TooLarge, TooSlow) as error:
            assert not has_answered, "a body is read before the answer"
            response = self._too_large()
            if isinstance(error, TooSlow):
                message = f"the request's body did not arrive in {_BODY_TIMEOUT_S:.0f} s"
                response = JSONResponse(error_body(message, "invalid_request_error"), 408)
            await response(scope, receive, send)

    def _may_enter(self, scope: Message, authorization: bytes) -> bool:
        if not self._keys or scope["path"] in _OPEN_PATHS or scope["method"] == "OPTIONS":
            return True
        kind, _, key = authorization.partition(b" ")
        is_known = [secrets.compare_digest(key.strip(), known) for known in self._keys]
        return kind.lower() == b"bearer" and any(is_known)

    def _too_large(self) -> JSONResponse:
        message = f"the request's body exceeds {self._max_bytes} bytes (--max_request_mib)"
        return JSONResponse(
            error_body(message, "invalid_request_error"), 413, {"Connection": "close"}
        )

    def _limited(self, receive: Receive) -> Receive:
        loop = asyncio.get_running_loop()
        deadline, num_bytes, is_whole = loop.time() + _BODY_TIMEOUT_S, 0, False

        async def limited() -> Message:
            nonlocal num_bytes, is_whole
            if is_whole:  # what follows is the end of the connection
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), max(0.0, deadline - loop.time()))
            except asyncio.TimeoutError:
                raise TooSlow from None
            num_bytes += len(message.get("body", b""))
            is_whole = not message.get("more_body", False)
            if num_bytes > self._max_bytes:
                raise TooLarge
            return message

        return limited
