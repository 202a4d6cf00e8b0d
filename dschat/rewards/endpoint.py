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

from dschat.config.reward import RewardSourcesConfig
from dschat.rewards.call import Fault, Values, shortened, values_of
from dschat.rewards.samples import Samples
from dschat.rewards.sources import Parts
from dschat.rewards.threads import Pool, within

ENDPOINT = "http"  # the name of the source
_FIRST_PAUSE_S = 0.5  # doubles with every retry
_LONGEST_PAUSE_S = 30.0
_TRANSIENT = {408, 425, 429}  # and 5xx: the same request may work later
_HEADERS = {"Content-Type": "application/json", "Accept": "application/json"}
_CHUNK_BYTES = 1 << 16


class _TransientFailure(Fault):
    """A failure that a retry may fix, ``wait_s`` from now at the earliest."""

    wait_s = 0.0


class Endpoint:
    """A reward source: posts samples to ``reward_url``."""

    overlaps = True

    def __init__(self, config: RewardSourcesConfig) -> None:
        assert config.reward_url
        self.name = ENDPOINT
        self.label = f"--reward_url {config.reward_url}"
        self.weight = config.reward_url_weight
        self._url = config.reward_url
        self._batch_size = config.reward_url_batch_size
        self._retries = config.reward_retries
        self._threads = Pool(config.reward_workers)
        self.close = self._threads.close

    def score(self, samples: Samples, timeout_s: float) -> Parts:
        """One request per batch; no attempt at it takes longer than ``timeout_s``."""
        starts = range(0, len(samples), self._batch_size)
        parts = [samples.part(start, start + self._batch_size) for start in starts]
        return Parts([self._threads.submit(self._batch, part, timeout_s) for part in parts])

    def _batch(self, samples: Samples, timeout_s: float) -> Values:
        """The values of one request; the fault of all its samples if no attempt worked."""
        body = body_of(samples)
        for attempt in range(self._retries + 1):
            try:
                rewards = self._post(body, timeout_s)
                return values_of(rewards, [len(ids) for ids in samples.answer_ids])
            except _TransientFailure as failure:
                times = f"{attempt + 1} times" if attempt else "once"
                fault = Fault(f"{failure.problem} ({times})", failure.timed_out)
                pause_s = max(_FIRST_PAUSE_S * 2**attempt, failure.wait_s)
            except Fault as invalid:
                return [invalid] * len(samples)
            if attempt < self._retries:
                time.sleep(min(pause_s, _LONGEST_PAUSE_S))
        return [fault] * len(samples)

    def _post(self, body: bytes, timeout_s: float) -> list[Any]:
        """The list in the reply.

        Raises:
            _TransientFailure: a retry may help.
            Fault: a retry cannot help.
        """
        request = urllib.request.Request(self._url, body, _HEADERS)
        try:
            return rewards_of(within(timeout_s, _exchange, request, timeout_s))
        except urllib.error.HTTPError as error:
            error.close()  # it holds the connection
            answered = f"answered {error.code} {error.reason}".strip()
            if error.code not in _TRANSIENT and error.code < 500:
                raise Fault(answered) from None
            failure = _TransientFailure(answered)
            seconds = error.headers.get("Retry-After", "")
            failure.wait_s = float(seconds) if seconds.isdecimal() else 0.0
            raise failure from None
        except (OSError, http.client.HTTPException) as error:  # TimeoutError is an OSError
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                message = f"did not answer within {timeout_s:.3g} s"
                raise _TransientFailure(message, timed_out=True) from None
            message = " ".join(str(reason).split()) or type(reason).__name__
            raise _TransientFailure(f"cannot be reached: {message}") from None


def _exchange(request: urllib.request.Request, timeout_s: float) -> bytes:
    """The reply's body.

    The limit here ends the thread that `within` has given up. urllib's timeout bounds single reads,
    but not DNS lookups or slow headers.
    """
    end, chunks = time.monotonic() + timeout_s, []
    with urllib.request.urlopen(request, timeout=timeout_s) as reply:
        while chunk := reply.read1(_CHUNK_BYTES):
            chunks.append(chunk)
            if time.monotonic() > end:
                raise TimeoutError
    return b"".join(chunks)


def body_of(samples: Samples) -> bytes:
    """The request for ``samples``."""
    content = samples.columns | {
        "prompts": samples.prompts,
        "answers": samples.answers,
        "finish_reasons": samples.finish_reasons,
    }
    return json.dumps(content, default=str).encode()


def rewards_of(reply: bytes) -> list[Any]:
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
