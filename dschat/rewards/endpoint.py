"""Scores samples with an HTTP endpoint: one POST per batch, retried on transient failures.

The request is ``{"prompts": [...], "answers": [...], "finish_reasons": [...], COLUMN: [...]}``,
each list with one entry per sample. The reply is ``{"rewards": [...]}``, one entry per sample: a
number, a list of one number per token of the answer, or null.
"""

import http.client
import json
import time
import urllib.error
import urllib.request
from typing import Any

from dschat.rewards.call import Fault, Value, shortened, values_of
from dschat.rewards.pool import within
from dschat.rewards.samples import Samples

_LONGEST_PAUSE_S = 30.0
_TRANSIENT = {408, 425, 429}  # and 5xx: the same request may work later
_CHUNK_BYTES = 1 << 16


class Endpoint:
    """Posts samples to one URL. ``first_pause_s`` doubles with every retry."""

    def __init__(self, url: str, retries: int, first_pause_s: float = 0.5) -> None:
        self.url = url
        self._retries = retries
        self._first_pause_s = first_pause_s

    def __call__(self, samples: Samples, limit_s: float) -> list[Value | Fault]:
        """One value per sample; no attempt takes longer than ``limit_s``.

        Raises:
            Fault: all attempts failed, or the reply is invalid.
        """
        body = _body(samples)
        lengths = [len(ids) for ids in samples.answer_ids]
        for attempt in range(self._retries + 1):
            try:
                return values_of(_rewards(self._post(body, limit_s)), lengths)
            except _TransientFailure as problem:
                if attempt == self._retries:
                    times = "once" if attempt == 0 else f"{attempt + 1} times"
                    raise Fault(f"{problem} ({times})", timed_out=problem.timed_out) from None
                pause = self._first_pause_s * 2**attempt
                time.sleep(min(max(pause, problem.wait_s), _LONGEST_PAUSE_S))
        raise AssertionError("unreachable")

    def _post(self, body: bytes, limit_s: float) -> bytes:
        """The reply's body.

        Raises:
            _TransientFailure: a retry may help.
            Fault: a retry cannot help.
        """
        request = urllib.request.Request(
            self.url, body, {"Content-Type": "application/json", "Accept": "application/json"}
        )
        try:
            return within(limit_s, _exchange, request, limit_s)
        except urllib.error.HTTPError as error:
            error.close()  # it holds the connection
            answered = f"answered {error.code} {error.reason}".strip()
            if error.code in _TRANSIENT or error.code >= 500:
                wait_s = _seconds(error.headers.get("Retry-After"))
                raise _TransientFailure(answered, wait_s) from None
            raise Fault(answered) from None
        except (OSError, http.client.HTTPException) as error:  # TimeoutError is an OSError
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                message = f"did not answer within {limit_s:.3g} s"
                raise _TransientFailure(message, timed_out=True) from None
            message = " ".join(str(reason).split()) or type(reason).__name__
            raise _TransientFailure(f"cannot be reached: {message}") from None


def _exchange(request: urllib.request.Request, limit_s: float) -> bytes:
    """The reply's body.

    The limit here ends the thread that `within` has given up. urllib's timeout bounds single reads,
    but not DNS lookups or slow headers.
    """
    end, chunks = time.monotonic() + limit_s, []
    with urllib.request.urlopen(request, timeout=limit_s) as reply:
        while chunk := reply.read1(_CHUNK_BYTES):
            chunks.append(chunk)
            if time.monotonic() > end:
                raise TimeoutError
    return b"".join(chunks)


class _TransientFailure(Exception):
    """A failure that a retry may fix, ``wait_s`` from now at the earliest."""

    def __init__(self, message: str, wait_s: float = 0.0, timed_out: bool = False) -> None:
        super().__init__(message)
        self.wait_s = wait_s
        self.timed_out = timed_out


def _body(samples: Samples) -> bytes:
    content = samples.columns | {
        "prompts": samples.prompts,
        "answers": samples.answers,
        "finish_reasons": samples.finish_reasons,
    }
    return json.dumps(content, default=str).encode()


def _rewards(reply: bytes) -> list[Any]:
    """The list of a reply: at the top level, or under ``rewards`` or ``scores``."""
    try:
        content = json.loads(reply)
    except (ValueError, RecursionError):
        shown = shortened(" ".join(reply[:200].decode(errors="replace").split()), 60)
        raise Fault(f"answered with invalid JSON ({shown!r})") from None
    if isinstance(content, dict):
        content = content.get("rewards", content.get("scores"))
    if not isinstance(content, list):
        raise Fault('answered JSON without a list "rewards"')
    return content


def _seconds(header: str | None) -> float:
    return float(header) if header and header.isdecimal() else 0.0
