"""What scores samples: the interface of all reward sources, and reward functions behind it."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from dschat.config import UserError
from dschat.rewards.call import (
    LONGEST_CALL_S,
    Fault,
    MissingColumn,
    Values,
    arguments,
)
from dschat.rewards.loader import RewardFunction
from dschat.rewards.samples import Samples
from dschat.rewards.threads import at_once


class RewardSource(Protocol):
    """Scores samples in calls that follow each other. ``label`` names it in messages.

    ``overlaps``: it scores in the background after `score` returns. ``takes_parts``: it may get the
    prompts of a rollout a few at a time.
    """

    name: str
    label: str
    weight: float
    overlaps: bool
    takes_parts: bool

    def score(self, samples: Samples, in_one_call: bool = False) -> "list[Future[Values]]":
        """Start scoring. ``in_one_call``: of a function, however many workers there are."""


@dataclass
class FunctionSource:
    """A reward function: where its calls run, and how they are retried."""

    reward: RewardFunction
    run: Callable[[dict[str, Any], list[int], float], Values]  # (arguments, lengths, limit_s)
    timeout_s: float  # of a call
    submit: Callable[..., "Future[Values]"] = at_once  # starts such calls
    num_parts: int = 1
    retries: bool = False  # after a failed call, call again sample by sample
    prepare: Callable[[], None] = lambda: None  # before each of these, outside its time limit

    def __post_init__(self) -> None:
        reward = self.reward
        self.name, self.label, self.weight = reward.name, reward.label, reward.weight
        self.overlaps = self.submit is not at_once
        self.takes_parts = self.num_parts > 1

    def score(self, samples: Samples, in_one_call: bool = False) -> "list[Future[Values]]":
        cuts = samples.cuts(1 if in_one_call else self.num_parts)
        return [self.submit(self._values, samples.part(*cut)) for cut in cuts]

    def _values(self, samples: Samples) -> Values:
        try:
            return self.call(samples, self.timeout_s)
        except Fault as fault:
            if not self.retries or isinstance(fault, MissingColumn) or len(samples) == 1:
                return [fault] * len(samples)
            return self._one_by_one(samples, fault)

    def _one_by_one(self, samples: Samples, fault: Fault) -> Values:
        """The values of calls with one sample each, all within the time limit of one call."""
        values: Values = [fault] * len(samples)
        left_s = self.timeout_s
        for row in range(len(samples)):
            self.prepare()
            started = time.monotonic()
            try:
                (values[row],) = self.call(samples.part(row, row + 1), left_s)
            except Fault as retried:
                if retried.timed_out and left_s < self.timeout_s / 2:
                    break  # too little time left to tell whether this sample hangs
                if retried.timed_out and fault.timed_out:
                    retried = Fault(fault.problem, timed_out=True)  # it names the whole limit
                values[row] = retried
            left_s -= time.monotonic() - started
            if left_s <= 0:
                break
        return values

    def call(self, samples: Samples, limit_s: float) -> Values:
        """One call of the function.

        Raises:
            Fault: it failed as a whole.
        """
        try:
            sources = self.reward.sources(samples.columns)
        except UserError as error:
            raise MissingColumn(str(error)) from None
        # A copy: a function may change its arguments, and a retry needs the original ones.
        kwargs = self.reward.bound | arguments(sources, samples.part(0, len(samples)))
        own_limit_s = min(len(samples) * self.reward.limit_per_answer_s, LONGEST_CALL_S)
        lengths = [len(ids) for ids in samples.answer_ids]
        return self.run(kwargs, lengths, max(limit_s, own_limit_s))
