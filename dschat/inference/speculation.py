"""Drafts tokens from text seen before, so that one step computes several positions of an answer.

Speculative decoding without a second model: a draft continues the last tokens of an answer as they
went on elsewhere, in earlier answers to the prompt, in its other samples, in the prompt or in the
answer itself (prompt lookup decoding). The step that computes the draft draws a token at each of
its positions, with the random number that belongs there, and keeps the draft as far as it equals
them. So the answers are those of decoding one by one; drafts decide only how many steps it takes.

A draft of p expected tokens costs p rows more in a step, which may be worth it or not: see
`StepCost`. Captured steps have drafts of fixed lengths (`GuessingLoop`). Depends on tokens, and
under tensor parallelism on one rank's clock, so that all ranks draft alike.
"""

import math
import time
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass

from dschat.inference.scheduler import Scheduler
from dschat.inference.sequence import Prompt, Sequence, StepSchedule

MAX_DRAFT = 16
_CONTEXT = 3  # tokens that must match before a draft
_WORTH = 0.25  # `history`: draft a token that is accepted with at least this probability
_FIRST_RATE = 0.7  # assumed acceptance before any is known
_FIRST_LOOK_S = 1e-5  # to look for a sequence's draft, before it is known
_EXPLORES, _EXPLORED = 32, 32  # `auto` looks at one of so many sequences for so many tokens
_SEQUENCE_SHARE, _OVERALL_SHARE = 0.2, 0.01  # of one observation in the moving averages

_Context = tuple[int, int, int]
_Place = tuple[Tokens[int], int]  # tokens, and the index of the next one


class AnswerHistory:
    """Answers of earlier calls by prompt: at most ``max_tokens``, least recently used prompts go
    first.
    """

    def __init__(self, max_tokens: int = 1 << 23) -> None:
        self._max_tokens = max_tokens
        self._answers: OrderedDict[tuple[int, ...], list[Tokens[int]]] = OrderedDict()
        self.num_tokens = 0

    def add(self, answered: Iterable[tuple[list[int], list[int]]]) -> None:
        """Prompts and answers of a call, which replace earlier answers to the same prompts."""
        latest: dict[tuple[int, ...], list[Tokens[int]]] = {}
        for prompt, answer in answered:
            latest.setdefault(tuple(prompt), []).append(array("i", answer))
        for key, answers in latest.items():
            self.num_tokens -= sum(map(len, self._answers.pop(key, [])))
            self._answers[key] = answers
            self.num_tokens += sum(map(len, answers))
        while self.num_tokens > self._max_tokens:
            _, answers = self._answers.popitem(last=False)
            self.num_tokens -= sum(map(len, answers))

    def of(self, prompt: list[int]) -> list[Tokens[int]]:
        return self._answers.get(tuple(prompt), [])


class StepCost:
    """What ``auto`` knows of earlier steps, by which it drafts where that saves time.

    Seconds of a decode step as a + b rows, fitted to the latest steps.

    Attributes:
        look_s: seconds to look for the draft of a sequence; measured in steps that run eagerly.
        acceptance: how often a drafted token is right.
        foreseen: how often a token is found and right, of prompts without earlier answers.
        num_new: sequences of prompts without earlier answers.
    """

    # Of a step's weight with the next one. Where drafts do not pay, few steps have other sizes.
    _DECAY = 0.99

    def __init__(self) -> None:
        self._sums = (0.0,) * 5  # weights, rows, seconds, rows^2, rows x seconds
        self.look_s = _FIRST_LOOK_S
        self.acceptance = _FIRST_RATE
        self.foreseen = _FIRST_RATE
        self.num_new = 0

    def add(self, rows: int, seconds: float) -> None:
        d, (w, r, s, rr, rs) = self._DECAY, self._sums
        self._sums = (
            *(d * w + 1, d * r + rows, d * s + seconds),
            *(d * rr + rows * rows, d * rs + rows * seconds),
        )

    def add_looks(self, count: int, seconds: float) -> None:
        self.look_s += (1 - self._DECAY) * (seconds / count - self.look_s)

    def fit(self) -> tuple[float, float]:
        """a and b. Without steps of different sizes: half of the seconds each."""
        weight, rows, seconds, squares, products = self._sums
        if not weight:
            return 1.0, 1.0
        rows, seconds, squares, products = (x / weight for x in (rows, seconds, squares, products))
        variance, most = squares - rows * rows, seconds / rows
        row_s = most / 2
        if variance > 1e-3 * rows * rows:
            row_s = min(max((products - rows * seconds) / variance, 0.01 * most), 0.99 * most)
        return seconds - row_s * rows, row_s


@dataclass(slots=True, eq=False)
class _Follower:
    """Where a sequence's next tokens may be found. Without an index it was not looked at yet."""

    is_known: bool  # the prompt has earlier answers: each sequence shows how far it repeats them
    foreseen: float  # share of all tokens that were found and right
    rate: float  # of those that were found
    explores: bool  # looked at even where it does not pay, for `StepCost.foreseen`
    context: _Context
    index: dict[_Context, _Place] | None = None
    tokens: Tokens[int] = ()  # that it follows, from ``position`` on
    position: int = 0
    known: int = 0  # number of answer tokens taken into account


class Drafter:
    """Drafts for the sequences of one call of `generate`. ``is_auto``: only where it saves time."""

    def __init__(
        self, scheduler: Scheduler, history: AnswerHistory, cost: StepCost, is_auto: bool
    ) -> None:
        self._scheduler, self._history, self._cost = scheduler, history, cost
        # NOTE: not later: ranks must draft alike.
        self._fit, self._look_s = (cost.fit() if is_auto else None), cost.look_s
        self._indices: dict[Prompt, dict[_Context, _Place]] = {}
        self._followers: dict[Sequence, _Follower] = {}
        self._idle: list[Sequence] = []  # the sequences of a step, if it looked at none of them

    def propose(self, schedule: StepSchedule) -> None:
        """Set `Sequence.draft` of the sequences that decode in a step."""
        num_decodes = len(schedule.decodes)
        if schedule.decodes == self._idle:
            return
        started, num_indices = time.perf_counter(), len(self._indices)
        num_looks = num_new = 0
        worth, least = self._worth(num_decodes)
        budget = self._scheduler.draft_budget(schedule)
        for sequence in schedule.decodes:
            # The first token is drawn for all samples of the prompt.
            if not sequence.answer:
                num_new += 1
                continue
            follower = self._follower(sequence)
            explores = follower.explores and len(sequence.answer) < _EXPLORED
            if follower.foreseen < least and not explores:
                continue
            num_looks += 1
            self._catch_up(follower, sequence)
            rest = sequence.prompt.max_new_tokens - len(sequence.answer) - 1
            found = len(follower.tokens) - follower.position
            size = min(_length(follower.rate, worth), found, rest, budget)
            if size > 0:
                size = self._scheduler.room_for(sequence, size)
                first = follower.position
                sequence.draft = list(follower.tokens[first : first + size])
                budget -= size
        if num_looks and len(self._indices) == num_indices:  # an index is for many looks
            self._cost.add_looks(num_looks, time.perf_counter() - started)
        elif not num_looks and not num_new:
            self._idle = list(schedule.decodes)

    def _worth(self, num_sequences: int) -> tuple[float, float]:
        """Least probability of a drafted token, and of a token of a sequence to look at.

        A token adds a row, b seconds. If it is accepted, its sequence takes one step less, that is
        its share of a step: a / ``num_sequences`` + b. A look costs seconds too.
        """
        if self._fit is None:
            return _WORTH, 0.0
        start_s, row_s = self._fit
        saved_s, spent_s = start_s / max(1, num_sequences), row_s + self._look_s
        return row_s / (row_s + saved_s), spent_s / (spent_s + saved_s)

    def guesses(self, sequence: Sequence, most: int) -> tuple[Tokens[int], float]:
        """Up to ``most`` next tokens of an answer, and the share of them that were right so far."""
        f = self._follow(sequence)
        return f.tokens[f.position : f.position + most], f.rate

    def width(self, found: Iterable[tuple[int, float]], widths: list[int], size: int) -> int:
        """Which of ``widths``, 1 first, a step of ``size`` rows should have.

        ``found``: the number of guesses and their rate for each sequence.
        """
        found = list(found)
        if self._fit is None:
            worth = [min(n, _length(rate, _WORTH)) for n, rate in found]
            mean = sum(worth) / max(1, len(worth))
            return next((w for w in widths if w >= 1 + mean), widths[-1])
        start_s, row_s = self._fit

        def tokens_per_s(width: int) -> float:
            tokens = sum(rate**i for n, rate in found for i in range(min(n, width - 1) + 1))
            return tokens / (start_s + row_s * size * width)

        return max(widths, key=tokens_per_s)

    def may_pay(self, width: int, size: int) -> bool:
        """Whether a step of so many positions of ``size`` rows could save time."""
        if self._fit is None:
            return True
        start_s, _ = self._fit
        return start_s * (1 - 1 / width) > self._look_s * size  # if all guesses are right

    def took(self, rows: int, seconds: float) -> None:
        """A decode step of ``rows`` rows took ``seconds``."""
        self._cost.add(rows, seconds)

    def _follow(self, sequence: Sequence) -> _Follower:
        """Where a sequence is, with all its tokens."""
        follower = self._follower(sequence)
        self._catch_up(follower, sequence)
        return follower

    def _follower(self, sequence: Sequence) -> _Follower:
        """Where a sequence was when it was looked at last."""
        follower = self._followers.get(sequence)
        if follower is None:
            prompt, cost = sequence.prompt, self._cost
            is_known = bool(self._history.of(prompt.ids))
            explores = not is_known and cost.num_new % _EXPLORES == 0
            cost.num_new += not is_known
            foreseen = 1.0 if is_known else cost.foreseen
            follower = _Follower(is_known, foreseen, cost.acceptance, explores, _end(prompt.ids))
            self._followers[sequence] = follower
        return follower

    def _catch_up(self, f: _Follower, sequence: Sequence) -> None:
        """Take the new tokens of an answer into account."""
        prompt, answer, cost = sequence.prompt, sequence.answer, self._cost
        if f.index is None:
            if prompt not in self._indices:
                self._indices[prompt] = _index(prompt.ids, self._history.of(prompt.ids))
            f.index = self._indices[prompt]
        for i in range(f.known, len(answer)):
            token, is_right = answer[i], False
            if f.position < len(f.tokens):
                is_right = f.tokens[f.position] == token
                f.rate += _SEQUENCE_SHARE * (is_right - f.rate)
                cost.acceptance += _OVERALL_SHARE * (is_right - cost.acceptance)
                if not is_right:  # whoever is here next may follow this answer instead
                    f.index[f.context] = answer, i
            f.foreseen += _SEQUENCE_SHARE * (is_right - f.foreseen)
            if not f.is_known:
                cost.foreseen += _OVERALL_SHARE * (is_right - cost.foreseen)
            f.context = (f.context[1], f.context[2], token)
            f.position += 1
            if not is_right:
                # NOTE: without another place, the same one: only this token may differ.
                here = answer, i + 1
                place = f.index.setdefault(f.context, here)
                if place is not here:
                    f.tokens, f.position = place
        f.known = len(answer)


def _index(prompt: list[int], answers: Iterable[Tokens[int]]) -> dict[_Context, _Place]:
    """The place after each context in a prompt and its answers: of several, the last one."""
    index: dict[_Context, _Place] = {}
    for tokens, context in [(prompt, _end([])), *((a, _end(prompt)) for a in answers)]:
        for i, token in enumerate(tokens):
            index[context] = tokens, i
            context = (context[1], context[2], token)
    return index


def _length(rate: float, worth: float) -> int:
    """How many tokens to draft: all whose probability rate^i to be accepted is worth it."""
    if rate <= worth:
        return 0
    if rate >= worth ** (1 / MAX_DRAFT):
        return MAX_DRAFT
    return int(math.log(worth) / math.log(rate))


def _end(ids: list[int]) -> _Context:
    first, second, third = ([-1] * _CONTEXT + list(ids[-_CONTEXT:]))[-_CONTEXT:]
    return first, second, third
