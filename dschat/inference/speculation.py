"""Drafts tokens from text seen before, so that one step computes several positions of an answer.

Speculative decoding without a second model: a draft continues the last tokens of an answer as they
went on elsewhere, in earlier answers to the prompt, in its other samples, in the prompt or in the
answer itself (prompt lookup decoding). The step that computes the draft draws a token at each of
its positions, with the random number that belongs there, and keeps the draft as far as it equals
them. So the answers are those of decoding one by one; drafts decide only how many steps it takes.

The step that completes a prompt may compute a draft too: an earlier answer of up to 17 tokens that
is right again then needs no decode step. Samples with the same answer so far share a draft. A
drafted token costs a row of a step, which may be worth it or not (`Costs`). Captured steps have
drafts of fixed lengths (`GuessingLoop`). Depends on tokens, and under tensor parallelism on one
rank's clock, so that all ranks draft alike.
"""

import time
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Tokens
from dataclasses import dataclass

from dschat.inference.draft_costs import MAX_DRAFTED, CallChoice, CallKind, Costs
from dschat.inference.protocol import SamplingParams
from dschat.inference.scheduler import Scheduler
from dschat.inference.sequence import Event, Prompt, Sequence, StepSchedule
from dschat.inference.stats import GenerationStats

_CONTEXT = 3  # tokens that must match before a draft
_WORTH = 0.25  # `history`: draft a token that is accepted with at least this probability
_LOOK_S = 1e-5  # to look for the guesses of a row, about

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

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Answers of a call, which replace earlier answers to the same prompts."""
        latest: dict[tuple[int, ...], list[Tokens[int]]] = {}
        for sequence in sequences:
            key = tuple(sequence.prompt.ids)
            latest.setdefault(key, []).append(array("i", sequence.answer))
        for key, answers in latest.items():
            self.num_tokens -= sum(map(len, self._answers.pop(key, [])))
            self._answers[key] = answers
            self.num_tokens += sum(map(len, answers))
        while self.num_tokens > self._max_tokens:
            _, answers = self._answers.popitem(last=False)
            self.num_tokens -= sum(map(len, answers))

    def of(self, prompt: list[int]) -> list[Tokens[int]]:
        return self._answers.get(tuple(prompt), [])

    def num_known(self, prompts: Iterable[Prompt]) -> int:
        """How many of ``prompts`` have earlier answers."""
        return sum(tuple(p.ids) in self._answers for p in prompts)


@dataclass(slots=True, eq=False)
class _Follower:
    """Where a sequence's next tokens may be found.

    ``run``: 0 before the first token, then 1 + the tokens found and right since the last wrong one.
    """

    is_known: bool  # the prompt has earlier answers
    context: _Context
    index: dict[_Context, _Place]
    tokens: Tokens[int]  # that it follows, from ``position`` on
    position: int
    run: int = 0
    known: int = 0  # number of answer tokens taken into account
    first: int = 0  # from this token of the answer on, something is learned
    rows: int = 0  # of the step that drew those after them


class Drafter:
    """Drafts for the sequences of one call of `generate`. ``is_auto``: only where it saves time."""

    def __init__(
        self, scheduler: Scheduler, history: AnswerHistory, costs: Costs, is_auto: bool
    ) -> None:
        self._scheduler, self._history, self._costs = scheduler, history, costs
        # NOTE: not later: ranks must draft alike.
        self._fit = costs.decode.fit() if is_auto else None
        self._prefill_fit = costs.prefill.fit()
        self._indices: dict[Prompt, tuple[bool, dict[_Context, _Place]]] = {}
        self._followers: dict[Sequence, _Follower] = {}

    def propose(self, schedule: StepSchedule) -> None:
        """Set `Sequence.draft` of the sequences that draw a token in a step."""
        worth = [self._worth(schedule, is_known) for is_known in (False, True)]
        budget = min(self._scheduler.draft_budget(schedule), MAX_DRAFTED)
        lengths: dict[tuple[bool, int], int] = {}
        for sequence in schedule.ready:
            f = self._follow(sequence)
            f.rows = 1
            found = len(f.tokens) - f.position
            if found <= 0:
                continue
            state = f.is_known, f.run
            if state not in lengths:
                chances = self._costs.acceptance.chances(*state)
                lengths[state] = sum(chance >= worth[f.is_known] for chance in chances)
            rest = sequence.prompt.max_new_tokens - len(sequence.answer) - 1
            # Each of the row's sequences draws at each position.
            size = min(lengths[state], found, rest, budget // len(sequence.row))
            if size > 0:
                size = self._scheduler.room_for(sequence, size)
                sequence.draft = list(f.tokens[f.position : f.position + size])
                budget -= size * len(sequence.row)
                f.rows += size
        schedule.sort_chunks()

    def _worth(self, schedule: StepSchedule, is_known: bool) -> float:
        """Least probability of a drafted token.

        A token adds a row to this step. If it is accepted, it saves what a token takes otherwise:
        a / rows of the step + b without drafts, less where later steps draft too.
        """
        if self._fit is None:
            return _WORTH
        start_s, row_s = self._fit
        here_s = row_s
        if schedule.chunks and self._prefill_fit is not None:
            _, here_s = self._prefill_fit
        mean = self._costs.progress[is_known]
        share_s = start_s / (len(schedule.decodes) + len(schedule.chunks))
        return here_s * mean.tokens / (share_s + row_s * mean.rows)

    def guesses(self, sequence: Sequence, most: int) -> tuple[Tokens[int], list[float]]:
        """Up to ``most`` next tokens of an answer, and the probabilities that the first 1, 2, ...
        of them, at most `MAX_DRAFT`, are right.
        """
        f = self._follow(sequence)
        tokens = f.tokens[f.position : f.position + most]
        return tokens, self._costs.acceptance.chances(f.is_known, f.run)[: len(tokens)]

    def width(self, found: Iterable[list[float]], widths: list[int], size: int) -> int:
        """Which of ``widths``, 1 first, a step of ``size`` rows should have.

        ``found``: the second result of `guesses` for each sequence.
        """
        found = list(found)
        if self._fit is None:
            worth = [sum(chance >= _WORTH for chance in chances) for chances in found]
            mean = sum(worth) / max(1, len(worth))
            return next((w for w in widths if w >= 1 + mean), widths[-1])
        start_s, row_s = self._fit

        def tokens_per_s(width: int) -> float:
            tokens = sum(1 + sum(chances[: width - 1]) for chances in found)
            return tokens / (start_s + row_s * size * width)

        return max(widths, key=tokens_per_s)

    def may_pay(self, width: int, size: int) -> bool:
        """Whether a step of so many positions of ``size`` rows could save time."""
        if self._fit is None:
            return True
        start_s, _ = self._fit
        return start_s * (1 - 1 / width) > _LOOK_S * size  # if all guesses are right

    def ended(self, sequence: Sequence) -> None:
        """Learn from the last tokens of an answer."""
        if sequence in self._followers:
            self._follow(sequence)
            del self._followers[sequence]

    def took(self, rows: int, seconds: float, is_prefill: bool = False) -> None:
        """A step of ``rows`` rows took ``seconds``."""
        (self._costs.prefill if is_prefill else self._costs.decode).add(rows, seconds)

    def _follow(self, sequence: Sequence) -> _Follower:
        """Where a sequence is, with all its tokens."""
        prompt, answer, costs = sequence.prompt, sequence.answer, self._costs
        f = self._followers.get(sequence)
        if f is None:
            if prompt not in self._indices:
                answers = self._history.of(prompt.ids)
                self._indices[prompt] = bool(answers), _index(prompt.ids, answers)
            (is_known, index), context = self._indices[prompt], _end(prompt.ids)
            f = _Follower(is_known, context, index, *index.get(context, ((), 0)))
            f.first = len(answer)  # a twin before, or begun earlier: others learned from the rest
            self._followers[sequence] = f
        if f.rows and len(answer) > f.known:
            costs.progress[f.is_known].add(len(answer) - f.known, f.rows)
            f.rows = 0
        for i in range(f.known, len(answer)):
            token, is_right = answer[i], False
            if f.position < len(f.tokens):
                is_right = f.tokens[f.position] == token
                if i >= f.first:
                    costs.acceptance.add(f.is_known, f.run, is_right)
                if not is_right:  # the next one here may follow this answer instead
                    f.index[f.context] = answer, i
            f.run = max(1, f.run) + 1 if is_right else 1
            f.context = (f.context[1], f.context[2], token)
            f.position += 1
            if not is_right:
                # NOTE: without another place, the same one: only this token may differ.
                here = answer, i + 1
                place = f.index.setdefault(f.context, here)
                if place is not here:
                    f.tokens, f.position = place
        f.known = len(answer)
        return f


@dataclass
class Call:
    """One call of `generate`: it has a ``drafter``, or is the faster without."""

    choice: CallChoice
    kind: CallKind
    drafter: Drafter | None

    def timed(self, events: Iterator[Event], stats: GenerationStats) -> Iterator[Event]:
        """Passes ``events`` on, and counts the seconds until all are there."""
        started = time.perf_counter()
        yield from events
        if stats.answer_tokens:
            seconds = time.perf_counter() - started
            self.choice.add(self.kind, self.drafter is not None, seconds / stats.answer_tokens)


class Speculation:
    """What the calls of an engine draft from. ``is_auto``: only where it saves time."""

    def __init__(self, is_auto: bool) -> None:
        self._is_auto = is_auto
        self.history = AnswerHistory()
        self.costs = Costs()

    def call(self, scheduler: Scheduler, queue: list[Prompt], sampling: SamplingParams) -> Call:
        """How to answer the prompts of ``queue``."""
        choice, known = self.costs.choice, self.history.num_known(queue)
        kind = CallKind(
            (sampling.n * len(queue)).bit_length(),
            max(prompt.max_new_tokens for prompt in queue).bit_length(),
            round(2 * known / len(queue)),
            sampling.temperature > 0,
        )
        drafts = not self._is_auto or choice.drafts(kind)
        drafter = Drafter(scheduler, self.history, self.costs, self._is_auto) if drafts else None
        return Call(choice, kind, drafter)


def _index(prompt: list[int], answers: Iterable[Tokens[int]]) -> dict[_Context, _Place]:
    """The place after each context in a prompt and its answers: of several, the last one."""
    index: dict[_Context, _Place] = {}
    for tokens, context in [(prompt, _end([])), *((a, _end(prompt)) for a in answers)]:
        for i, token in enumerate(tokens):
            index[context] = tokens, i
            context = (context[1], context[2], token)
    return index


def _end(ids: list[int]) -> _Context:
    first, second, third = ([-1] * _CONTEXT + list(ids[-_CONTEXT:]))[-_CONTEXT:]
    return first, second, third
