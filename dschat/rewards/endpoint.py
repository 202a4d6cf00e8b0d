"""Scores samples with an HTTP endpoint; posts JSON, retried on transient failures.

The request is ``{"prompts": [...], "prompt_messages": [...], "answers": [...], "finish_reasons":
[...], COLUMN: [...]}``, each list with one entry per sample. The reply is ``{"rewards": [...]}``,
one entry per sample: a number, a list of one number per token of the answer, or null.
"""

import http.client
import json
import time
import urllib.request
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from dschat.config.reward import RewardSourcesConfig
from dschat.rewards.call import Samples, Values, values_of
from dschat.user_code.calls import Fault, Pool, shortened, within

ENDPOINT = "http"  # the name of the source
_FIRST_PAUSE_S = 0.5  # doubles with every retry
LONGEST_PAUSE_S = 30.0
_TRANSIENT = {408, 425, 429}  # and 5xx: the same request may work later
_HEADERS = {"Content-Type": "application/json", "Accept": "application/json"}
_CHUNK_BYTES = 1 << 16
_LARGEST_BYTES = 1 << 28  # of a reply
_DETAIL_BYTES = 1000  # of the body of an error


class Endpoint:
    """A reward source: posts samples to ``reward_url``."""

    overlaps = takes_parts = True

    def __init__(self, config: RewardSourcesConfig) -> None:
        assert config.reward_url
        self.name = ENDPOINT
        self.label = f"--reward_url {config.reward_url}"
        self.weight = config.reward_url_weight
        self._config, self._url = config, config.reward_url
        self._threads = Pool(config.reward_workers)
        self.close = self._threads.close

    def score(self, samples: Samples, in_one_call: bool = False) -> "list[Future[Values]]":
        """One request per batch; no attempt at it takes longer than the timeout."""
        size = self._config.reward_url_batch_size
        parts = [samples.part(start, start + size) for start in range(0, len(samples), size)]
        return [self._threads.submit(self._batch, part) for part in parts]

    def _batch(self, samples: Samples) -> Values:
        """The values of one request; the fault of all its samples if no attempt worked."""
        lengths = [len(ids) for ids in samples.answer_ids]
        limits = self._config.reward_timeout_s, self._config.reward_retries
        try:
            reply = post(self._url, body_of(samples), *limits)
            return values_of(rewards_of(reply), lengths)
        except Fault as fault:
            return [fault] * len(samples)


def body_of(samples: Samples) -> bytes:
    """The request for ``samples``."""
    content = samples.columns | {
        "prompts": samples.prompts,
        "prompt_messages": samples.chats,
        "answers": samples.answers,
        "finish_reasons": samples.finish_reasons,
    }
    return json.dumps(content, default=str).encode()


def rewards_of(content: Any) -> list[Any]:
    """The list of a reply: at the top level, or under ``rewards`` or ``scores``."""
    if isinstance(content, dict):
        content = content.get("rewards", content.get("scores"))
    if not isinstance(content, list):
        raise Fault('answered JSON without a list "rewards"')
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
            time.sleep(min(pause_s, LONGEST_PAUSE_S))
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
