"""One source's scores of some samples, whatever goes wrong, and which prompt it went wrong on.

A way to ask and samples come in; a value or a `Fault` for every sample goes out. It must not know
where the question is answered, nor what becomes of faults.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from dschat.rewards.call import Fault, MissingColumn, Value, shortened
from dschat.rewards.samples import Samples

# Samples and a limit in seconds -> their values; raises `Fault` where the call fails as a whole.
Ask = Callable[[Samples, float], list[Value | Fault]]
_PROMPT_SHOWN = 80  # characters


@dataclass(frozen=True)
class Attempts:
    """How a source is asked. Picks nothing: what it is told is all it does."""

    ask: Ask
    limit_s: float
    alone: bool  # after a failure, ask again for one sample at a time
    every: bool  # then go through all of them, to keep what can be scored; else to the first fault
    ready: Callable[[], None] = lambda: None  # what a call may need done, and does not count in it

    def values(self, samples: Samples) -> list[Value | Fault]:
        """A value for every sample, or the fault that stands in its place."""
        try:
            return self.ask(samples, self.limit_s)
        except Fault as fault:
            if not self.alone or isinstance(fault, MissingColumn):
                return [fault] * len(samples)
            if len(samples) == 1:
                return [_at(fault, 0)]
            return self._one_by_one(samples, fault)

    def _one_by_one(self, samples: Samples, fault: Fault) -> list[Value | Fault]:
        """Values of calls with one sample each, all together within the limit of one call.

        Without ``every`` they stand only up to the culprit; nobody keeps them.
        """
        end = time.monotonic() + self.limit_s
        values: list[Value | Fault] = [fault] * len(samples)
        for row in range(len(samples)):
            before = time.monotonic()
            self.ready()
            end += time.monotonic() - before
            left = end - time.monotonic()
            if left <= 0:
                return values
            try:
                (value,) = self.ask(samples.part(row, row + 1), left)
            except Fault as alone:
                if alone.timed_out and left < self.limit_s / 2:
                    return values  # too little time was left to say that it hangs
                value = fault if alone.timed_out and fault.timed_out else alone
            values[row] = _at(value, row) if isinstance(value, Fault) else value
            if isinstance(value, Fault) and not self.every:
                return values
        if self.every or any(isinstance(value, Fault) for value in values):
            return values
        what = f"{fault.what}; asked again for one sample at a time, it went well"
        return [Fault(what, None, fault.timed_out)] * len(samples)


def _at(fault: Fault, row: int) -> Fault:
    return Fault(fault.what, row, fault.timed_out)


def complaint(values: list[Value | Fault], samples: Samples, limit_s: float) -> str | None:
    """The worst of what went wrong, with its prompt and the remedy; None where nothing did."""
    faults = [(row, value) for row, value in enumerate(values) if isinstance(value, Fault)]
    if not faults:
        return None
    row, fault = next(((r, f) for r, f in faults if f.row is not None), faults[0])
    if isinstance(fault, MissingColumn):
        return fault.what
    if fault.row is not None:
        where = f" on the prompt {quoted(samples.prompts[row])}"
    elif len(samples) > 1:
        where = f" on {len(samples)} samples, the first on the prompt {quoted(samples.prompts[0])}"
    else:
        where = f" on the prompt {quoted(samples.prompts[0])}"
    remedy = f"raise --reward_timeout_s {limit_s:g} or fix it" if fault.timed_out else "fix it"
    return f"{fault.what}{where}; {remedy}, or pass --on_reward_error skip"


def quoted(prompt: str) -> str:
    return repr(shortened(" ".join(prompt.split()), _PROMPT_SHOWN))
