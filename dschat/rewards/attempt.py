"""Scores samples with one source; on failure, retries sample by sample to find the culprit."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from dschat.rewards.call import Fault, MissingColumn, Value, shortened
from dschat.rewards.samples import Samples

# Samples and a limit in seconds -> their values; raises `Fault` if the call fails as a whole.
Score = Callable[[Samples, float], list[Value | Fault]]
_PROMPT_SHOWN = 80  # characters


@dataclass(frozen=True)
class Attempts:
    """How to call a source, and how to retry after a failure."""

    score: Score
    limit_s: float
    one_by_one: bool  # after a failure, retry sample by sample
    all_samples: bool  # retry all samples and keep the valid scores; else stop at the first fault
    prepare: Callable[[], None] = lambda: None  # runs before each retry, outside its time limit

    def values(self, samples: Samples) -> list[Value | Fault]:
        """One value per sample, or a fault in its place."""
        try:
            return self.score(samples, self.limit_s)
        except Fault as fault:
            if not self.one_by_one or isinstance(fault, MissingColumn):
                return [fault] * len(samples)
            if len(samples) == 1:
                return [_at(fault, 0)]
            return self._one_by_one(samples, fault)

    def _one_by_one(self, samples: Samples, fault: Fault) -> list[Value | Fault]:
        """Values of calls with one sample each, all within the time limit of one call.

        Without ``all_samples`` this stops at the first fault.
        """
        end = time.monotonic() + self.limit_s
        values: list[Value | Fault] = [fault] * len(samples)
        for row in range(len(samples)):
            before = time.monotonic()
            self.prepare()
            end += time.monotonic() - before
            left_s = end - time.monotonic()
            if left_s <= 0:
                return values
            try:
                (value,) = self.score(samples.part(row, row + 1), left_s)
            except Fault as retried:
                if retried.timed_out and left_s < self.limit_s / 2:
                    return values  # too little time left to tell whether this sample hangs
                value = fault if retried.timed_out and fault.timed_out else retried
            values[row] = _at(value, row) if isinstance(value, Fault) else value
            if isinstance(value, Fault) and not self.all_samples:
                return values
        if self.all_samples or any(isinstance(value, Fault) for value in values):
            return values
        problem = f"{fault.problem}; retried one sample at a time, it succeeded"
        return [Fault(problem, None, fault.timed_out)] * len(samples)


def _at(fault: Fault, row: int) -> Fault:
    return Fault(fault.problem, row, fault.timed_out)


def complaint(values: list[Value | Fault], samples: Samples, limit_s: float) -> str | None:
    """One line for the faults in ``values``, with a prompt and the remedy; None without faults.

    A fault whose sample is known takes precedence.
    """
    faults = [(row, value) for row, value in enumerate(values) if isinstance(value, Fault)]
    if not faults:
        return None
    row, fault = next(((r, f) for r, f in faults if f.row is not None), faults[0])
    if isinstance(fault, MissingColumn):
        return fault.problem
    if fault.row is not None:
        where = f" on the prompt {quoted(samples.prompts[row])}"
    elif len(samples) > 1:
        where = f" on {len(samples)} samples, the first on the prompt {quoted(samples.prompts[0])}"
    else:
        where = f" on the prompt {quoted(samples.prompts[0])}"
    remedy = f"raise --reward_timeout_s {limit_s:g} or fix it" if fault.timed_out else "fix it"
    return f"{fault.problem}{where}; {remedy}, or pass --on_reward_error skip"


def quoted(prompt: str) -> str:
    return repr(shortened(" ".join(prompt.split()), _PROMPT_SHOWN))
