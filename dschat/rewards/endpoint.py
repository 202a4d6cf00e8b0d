"""An HTTP endpoint that scores: a request for some samples, repeated where that may help.

Samples come in, one value a sample or a `Fault` goes out. It must not know how many requests run at
a time, nor torch. The standard library's client: one POST of JSON needs no other.

The protocol: ``{"prompts": [...], "answers": [...], "finish_reasons": [...], COLUMN: [...]}`` comes
with one entry a sample in each list; the reply is ``{"rewards": [...]}``, with a number, a list of
one number for each of the answer's tokens, or null for each sample.
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
_MAY_PASS = {408, 425, 429}  # and 5xx: the same request may work later
_PIECE = 1 << 16


class Endpoint:
    """One URL. ``first_pause_s`` doubles with every repetition."""

    def __init__(self, url: str, retries: int, first_pause_s: float = 0.5) -> None:
        self.url = url
        self._retries = retries
        self._first_pause_s = first_pause_s

    def __call__(self, samples: Samples, limit_s: float) -> list[Value | Fault]:
        """One value for each of ``samples``; no attempt takes longer than ``limit_s``.

        Raises:
            Fault: all attempts failed, or the reply makes no sense.
        """
        body = _body(samples)
        lengths = [len(ids) for ids in samples.answer_ids]
        for attempt in range(self._retries + 1):
            try:
                return values_of(_rewards(self._post(body, limit_s)), lengths)
            except _Passing as problem:
                if attempt == self._retries:
                    times = "once" if attempt == 0 else f"{attempt + 1} times"
                    raise Fault(f"{problem} ({times})", timed_out=problem.timed_out) from None
                pause = self._first_pause_s * 2**attempt
                time.sleep(min(max(pause, problem.wait_s), _LONGEST_PAUSE_S))
        raise AssertionError("unreachable")

    def _post(self, body: bytes, limit_s: float) -> bytes:
        """The reply's body.

        Raises:
            _Passing: something that may pass.
            Fault: something that will not.
        """
        request = urllib.request.Request(
            self.url, body, {"Content-Type": "application/json", "Accept": "application/json"}
        )
        try:
            return within(limit_s, _exchange, request, limit_s)
        except urllib.error.HTTPError as error:
            answered = f"answered {error.code} {error.reason}".strip()
            if error.code in _MAY_PASS or error.code >= 500:
                raise _Passing(answered, _seconds(error.headers.get("Retry-After"))) from None
            raise Fault(answered) from None
        except TimeoutError:
            raise _Passing(f"did not answer within {limit_s:.3g} s", timed_out=True) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                what = f"did not answer within {limit_s:.3g} s"
                raise _Passing(what, timed_out=True) from None
            message = " ".join(str(reason).split()) or type(reason).__name__
            raise _Passing(f"cannot be reached: {message}") from None


def _exchange(request: urllib.request.Request, limit_s: float) -> bytes:
    """The reply's body. The limit is that of a thread which nobody waits for any longer; by itself
    it bounds each read alone, and neither the search for the host nor headers that trickle in.
    """
    end, pieces = time.monotonic() + limit_s, []
    with urllib.request.urlopen(request, timeout=limit_s) as reply:
        while piece := reply.read1(_PIECE):
            pieces.append(piece)
            if time.monotonic() > end:
                raise TimeoutError
    return b"".join(pieces)


class _Passing(Exception):
    """A failure that a repetition may fix, ``wait_s`` from now at the earliest."""

    def __init__(self, what: str, wait_s: float = 0.0, timed_out: bool = False) -> None:
        super().__init__(what)
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
    """The list in a reply: bare, or under ``rewards`` or ``scores``."""
    try:
        content = json.loads(reply)
    except (ValueError, RecursionError):
        shown = shortened(" ".join(reply[:200].decode(errors="replace").split()), 60)
        raise Fault(f"answered what is no JSON ({shown!r})") from None
    if isinstance(content, dict):
        content = content.get("rewards", content.get("scores"))
    if not isinstance(content, list):
        raise Fault('answered JSON without a list "rewards"')
    return content


def _seconds(header: str | None) -> float:
    return float(header) if header and header.isdecimal() else 0.0
