"""Scores samples with an HTTP endpoint: one POST per batch, retried on transient failures.

The request is ``{"prompts": [...], "answers": [...], "finish_reasons": [...], COLUMN: [...]}``,
each list with one entry per sample. The reply is ``{"rewards": [...]}``, one entry per sample: a
number, a list of one number per token of the answer, or null.
"""

import json
from concurrent.futures import Future
from typing import Any

from dschat.config.reward import RewardSourcesConfig
from dschat.rewards.call import Fault, Values, values_of
from dschat.rewards.http_post import post
from dschat.rewards.samples import Samples
from dschat.rewards.threads import Pool

ENDPOINT = "http"  # the name of the source


class Endpoint:
    """A reward source: posts samples to ``reward_url``."""

    overlaps = takes_parts = True

    def __init__(self, config: RewardSourcesConfig) -> None:
        assert config.reward_url
        self.name = ENDPOINT
        self.label = f"--reward_url {config.reward_url}"
        self.weight = config.reward_url_weight
        self._url = config.reward_url
        self._batch_size = config.reward_url_batch_size
        self._retries, self._timeout_s = config.reward_retries, config.reward_timeout_s
        self._threads = Pool(config.reward_workers)
        self.close = self._threads.close

    def score(self, samples: Samples, in_one_call: bool = False) -> "list[Future[Values]]":
        """One request per batch; no attempt at it takes longer than the timeout."""
        starts = range(0, len(samples), self._batch_size)
        parts = [samples.part(start, start + self._batch_size) for start in starts]
        return [self._threads.submit(self._batch, part) for part in parts]

    def _batch(self, samples: Samples) -> Values:
        """The values of one request; the fault of all its samples if no attempt worked."""
        lengths = [len(ids) for ids in samples.answer_ids]
        try:
            reply = post(self._url, body_of(samples), self._timeout_s, self._retries)
            return values_of(rewards_of(reply), lengths)
        except Fault as fault:
            return [fault] * len(samples)


def body_of(samples: Samples) -> bytes:
    """The request for ``samples``."""
    content = samples.columns | {
        "prompts": samples.prompts,
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
