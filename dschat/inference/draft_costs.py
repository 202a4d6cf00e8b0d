"""Measures what decides whether, and how far, `--speculate auto` drafts.

Seconds of steps by their rows, how often drafted tokens are right, and seconds of whole calls with
drafts and without. `--speculate history` uses the second alone.
"""

from collections import deque
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from statistics import median
from typing import NamedTuple

MAX_DRAFT = 16  # tokens of a sequence in a step
MAX_DRAFTED = 512  # in a step, of all sequences: each draws from a row of logits
_FIRST_RATE = 0.7  # assumed acceptance before any is known
_SHARE = 0.05  # of one observation in the moving averages
_MIN_CALLS = 3  # of each side before one of them is the faster
_CALLS, _ANSWERS = 5, 64  # compares medians of so many calls, of few answers more
_TRIED_AGAIN = 16, 32  # calls between two with the slower side


class CallKind(NamedTuple):
    """Calls of a kind take about the same seconds a token."""

    num_answers: int  # bits of it
    max_new_tokens: int  # bits of it
    known: int  # halves of the prompts that have earlier answers
    draws: bool  # not the likeliest tokens


class StepCost:
    """Seconds of a step as a + b rows, fitted to the latest steps but the first, which warms up."""

    _DECAY = 0.98  # of a step's weight with the next one

    def __init__(self) -> None:
        self._is_warm = False
        self._sums = (0.0,) * 5  # weights, rows, seconds, rows^2, rows x seconds

    def add(self, rows: int, seconds: float) -> None:
        if not self._is_warm:
            self._is_warm = True
            return
        d, (w, r, s, rr, rs) = self._DECAY, self._sums
        self._sums = (
            *(d * w + 1, d * r + rows, d * s + seconds),
            *(d * rr + rows * rows, d * rs + rows * seconds),
        )

    def fit(self) -> tuple[float, float] | None:
        """a and b. Without steps of different sizes: half of the seconds each."""
        weight, rows, seconds, squares, products = self._sums
        if not weight:
            return None
        rows, seconds, squares, products = (x / weight for x in (rows, seconds, squares, products))
        variance, most = squares - rows * rows, seconds / rows
        row_s = most / 2
        if variance > 1e-3 * rows * rows:
            row_s = min(max((products - rows * seconds) / variance, 0.01 * most), 0.99 * most)
        return seconds - row_s * rows, row_s


@dataclass
class _Side:
    """Calls of one kind, with drafts or without.

    Attributes:
        seconds: for a token, in the latest calls but the first, which warms up.
        last: number of the latest one among the calls of both sides; 0: none yet.
    """

    seconds: deque[float]
    last: int = 0

    @property
    def token_s(self) -> float:
        return median(self.seconds)

    def add(self, token_s: float, number: int) -> None:
        if self.last:
            self.seconds.append(token_s)
        self.last = number


class CallChoice:
    """Whether a call of ``auto`` drafts: as the faster ones of like calls with drafts and without.

    The slower side is tried again, the less often the more it loses.
    """

    def __init__(self) -> None:
        self._sides: dict[CallKind, tuple[_Side, _Side]] = {}  # with drafts, without

    def drafts(self, kind: CallKind) -> bool:
        """Whether the next call of this kind should draft."""
        sides = self._sides.get(kind)
        if sides is None:
            return True
        for side in sides:
            if not side.seconds:
                return side is sides[0]
        if min(len(side.seconds) for side in sides) < _MIN_CALLS:
            return sides[0].last < sides[1].last
        fast, slow = sorted(sides, key=lambda side: side.token_s)
        loss = slow.token_s / fast.token_s - 1
        is_due = fast.last - slow.last >= min(max(100 * loss, _TRIED_AGAIN[0]), _TRIED_AGAIN[1])
        return (slow if is_due else fast) is sides[0]

    def add(self, kind: CallKind, drafted: bool, token_s: float) -> None:
        """A call took ``token_s`` seconds for a token."""
        sides = self._sides.get(kind)
        if sides is None:
            count = max(_CALLS, _ANSWERS >> kind.num_answers)
            sides = self._sides[kind] = _Side(deque(maxlen=count)), _Side(deque(maxlen=count))
        sides[0 if drafted else 1].add(token_s, 1 + max(side.last for side in sides))


class Acceptance:
    """How often a drafted token is right, by what was drafted before it in the sequence.

    Wrong tokens come in runs, and right ones too: an answer goes on as before, or is another one.
    """

    def __init__(self) -> None:
        # Of prompts without and with earlier answers: by `_Follower.run`.
        self._rates = [[_FIRST_RATE] * (MAX_DRAFT + 1) for _ in range(2)]
        self._counts = [[1] * (MAX_DRAFT + 1) for _ in range(2)]

    def add(self, is_known: bool, run: int, is_right: bool) -> None:
        rates, counts, i = self._rates[is_known], self._counts[is_known], min(run, MAX_DRAFT)
        counts[i] += 1
        rates[i] += max(_SHARE, 1 / counts[i]) * (is_right - rates[i])

    def chances(self, is_known: bool, run: int) -> list[float]:
        """The probabilities that the next 1, 2, ... `MAX_DRAFT` tokens are all right."""
        rates = self._rates[is_known]
        after = max(run, 1) + 1  # `run` after a right token
        runs = [run, *range(after, after + MAX_DRAFT - 1)]
        return list(accumulate((rates[min(run, MAX_DRAFT)] for run in runs), mul))


class Progress:
    """What sequences draw in a step, and compute for it: means of the latest steps.

    Attributes:
        tokens: drawn in a step: one, and what was accepted.
        rows: computed in a step: one, and what was drafted.
    """

    def __init__(self) -> None:
        self.tokens = self.rows = 1.0

    def add(self, tokens: int, rows: int) -> None:
        self.tokens += _SHARE * (tokens - self.tokens)
        self.rows += _SHARE * (rows - self.rows)


@dataclass
class Costs:
    """What is known of earlier steps and calls; under tensor parallelism from one rank's clock.

    ``decode``, ``prefill`` and ``choice`` serve ``auto`` alone.
    """

    decode: StepCost = field(default_factory=StepCost)
    prefill: StepCost = field(default_factory=StepCost)
    choice: CallChoice = field(default_factory=CallChoice)
    acceptance: Acceptance = field(default_factory=Acceptance)
    # Of prompts without and with earlier answers.
    progress: list[Progress] = field(default_factory=lambda: [Progress(), Progress()])
