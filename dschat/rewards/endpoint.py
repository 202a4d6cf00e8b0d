"""The ready-made function ``http``, and what it shares with the judges: an HTTP endpoint that is
asked by POST of JSON, retried on transient failures.

The request of ``http`` is ``{"prompts": [...], "prompt_messages": [...], "answers": [...],
"finish_reasons": [...], COLUMN: [...]}``, each list with one entry per sample. The reply is
``{"rewards": [...]}``, one entry per sample: a number, a list of one number per token, or null.
"""

import http.client
import json
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dschat.config.errors import require
from dschat.config.fields import require_valid
from dschat.rewards.samples import GIVEN
from dschat.user_code.calls import Fault, shortened, within

_LONGEST_REQUEST_S = 900.0  # with its retries
_FIRST_PAUSE_S = 0.5  # doubles with every retry
_LONGEST_PAUSE_S = 30.0
_TRANSIENT = {408, 425, 429}  # and 5xx: the same request may work later
_HEADERS = {"Content-Type": "application/json", "Accept": "application/json"}
_CHUNK_BYTES = 1 << 16
_LARGEST_BYTES = 1 << 28  # of a reply
_DETAIL_BYTES = 1000  # of the body of an error


@dataclass
class Endpoint:
    """An HTTP endpoint that scores answers."""

    url: str = ""
    timeout_s: float = 60.0  # of a request
    retries: int = 3

    name: ClassVar[str]
    example: ClassVar[str]  # of a URL

    def __post_init__(self) -> None:
        flag = f"--reward_args {self.name}."
        require_valid(self, flag)
        require(bool(self.url), f"is missing its endpoint: {flag}url={self.example}")
        require(
            self.url.startswith(("http://", "https://")),
            f"{flag}url={self.url} must begin with http:// or https://",
        )
        require(self.retries >= 0, f"{flag}retries must be at least 0")
        require(self.timeout_s > 0, f"{flag}timeout_s={self.timeout_s} must be above 0")
        attempts_s, pauses_s = (self.retries + 1) * self.timeout_s, self.retries * _LONGEST_PAUSE_S
        self.limit_per_answer_s = attempts_s + pauses_s
        require(
            self.limit_per_answer_s <= _LONGEST_REQUEST_S,
            f"{flag}timeout_s={self.timeout_s:g} takes {self.limit_per_answer_s:g} s with "
            f"{self.retries} retries and their pauses; lower it or {self.name}.retries: "
            f"at most {_LONGEST_REQUEST_S:g} s",
        )

    def reply(self, url: str, body: bytes, headers: Mapping[str, str] | None = None) -> Any:
        """The JSON that ``url`` replies to ``body``. Raises ``Fault``."""
        try:
            return post(url, body, self.timeout_s, self.retries, headers)
        except Fault as fault:
            longer = f"; raise {self.name}.timeout_s" if fault.timed_out else ""
            raise Fault(f"got no reply: {url} {fault.problem}{longer}") from None


@dataclass
class Http(Endpoint):
    """The rewards that an endpoint of the user's gives, in one request per call."""

    name = "http"
    example = "http://host:8000/score"

    def __call__(
        self,
        prompts: list[str],
        prompt_messages: list[Any],
        answers: list[str],
        finish_reasons: list[str],
        **columns: list[Any],
    ) -> list[Any]:
        request = {name: of for name, of in columns.items() if name not in GIVEN} | {
            "prompts": prompts,
            "prompt_messages": prompt_messages,
            "answers": answers,
            "finish_reasons": finish_reasons,
        }
        content = self.reply(self.url, json.dumps(request, default=str).encode())
        if isinstance(content, dict):
            content = content.get("rewards", content.get("scores"))
        if not isinstance(content, list):
            raise Fault(f'got a reply without a list "rewards" from {self.url}')
        return content


# -- one request -------------------------------------------------------------------------------


class _AnyStatus(urllib.request.HTTPErrorProcessor):
    """Errors and redirects are replies. A redirect would take the key to another host, and drop
    the body.
    """

    def http_response(self, request: Any, response: Any) -> Any:
        return response

    https_response = http_response


class _TransientFailure(Fault):
    """A failure that a retry may fix, ``wait_s`` from now at the earliest."""

    wait_s = 0.0


def post(
    url: str, body: bytes, timeout_s: float, retries: int, headers: Mapping[str, str] | None = None
) -> Any:
    """The JSON of the reply to ``body``; no attempt takes longer than ``timeout_s``.

    Raises:
        Fault: no attempt worked, or a retry cannot help.
    """
    request = urllib.request.Request(url, body, _HEADERS | dict(headers or {}))
    for attempt in range(retries + 1):
        try:
            return _parsed(_post(request, timeout_s))
        except _TransientFailure as failure:
            times = f"{attempt + 1} times" if attempt else "once"
            fault = Fault(f"{failure.problem} ({times})", failure.timed_out)
            pause_s = max(_FIRST_PAUSE_S * 2**attempt, failure.wait_s)
        if attempt < retries:
            time.sleep(min(pause_s, _LONGEST_PAUSE_S))
    raise fault


def _post(request: urllib.request.Request, timeout_s: float) -> bytes:
    """The reply's body. Raises ``_TransientFailure`` where a retry may help, else ``Fault``."""
    try:
        reply, body = within(timeout_s, _exchange, request, timeout_s)
    except (OSError, http.client.HTTPException, Fault) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, (TimeoutError, Fault)):
            message = f"did not answer within {timeout_s:.3g} s"
            raise _TransientFailure(message, timed_out=True) from None
        message = " ".join(str(reason).split()) or type(reason).__name__
        raise _TransientFailure(f"cannot be reached: {message}") from None
    if len(body) > _LARGEST_BYTES:
        raise Fault(f"answered with more than {_LARGEST_BYTES >> 20} MiB")
    if 200 <= reply.status < 300:
        return body
    answered = f"answered {reply.status} {reply.reason}".strip()
    if reply.status not in _TRANSIENT and reply.status < 500:
        detail = " ".join(body[:_DETAIL_BYTES].decode(errors="replace").split())
        raise Fault(f"{answered}: {shortened(detail, 120)}" if detail else answered)
    failure = _TransientFailure(answered)
    seconds = reply.headers.get("Retry-After", "")
    failure.wait_s = float(seconds) if seconds.isdecimal() else 0.0
    raise failure


def _exchange(
    request: urllib.request.Request, timeout_s: float
) -> tuple[http.client.HTTPResponse, bytes]:
    """The reply and its body, which ends soon after `_LARGEST_BYTES`.

    The limit here ends the thread that `within` has given up. urllib's timeout bounds single reads,
    but not DNS lookups or slow headers.
    """
    end, body = time.monotonic() + timeout_s, bytearray()
    opener = urllib.request.build_opener(_AnyStatus)
    with opener.open(request, timeout=timeout_s) as reply:
        while len(body) <= _LARGEST_BYTES and (chunk := reply.read1(_CHUNK_BYTES)):
            body += chunk
            if time.monotonic() > end:
                raise TimeoutError
    return reply, bytes(body)


def _parsed(reply: bytes) -> Any:
    try:
        return json.loads(reply)
    except (ValueError, RecursionError):
        shown = shortened(" ".join(reply[:200].decode(errors="replace").split()), 60)
        raise Fault(f"answered with invalid JSON ({shown!r})") from None
