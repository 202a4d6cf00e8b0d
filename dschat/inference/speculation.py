"""Drafts tokens from text seen before, so that one step computes several positions of an answer.

Speculative decoding without a second model: a draft continues the last tokens of an answer as they
went on elsewhere, in earlier answers to the prompt, in its other samples, in the prompt or in the
answer itself (prompt lookup decoding). The step that computes the draft draws a token at each of
its positions, with the random number that belongs there, and keeps the draft as far as it equals
them. So the answers are those of decoding one by one; drafts decide only how many steps it takes.

A token is drafted where it is accepted often enough for `EngineConfig.speculate`: a rejected one
costs a row of a step. The step that completes a prompt may compute a draft too: an earlier answer
of up to 17 tokens that is right again then needs no decode step. Samples with the same answer so
far share a draft. Captured steps have drafts of fixed lengths (`CapturedCore`). Drafts depend on
tokens alone, so all ranks of a tensor-parallel group draft alike.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise
from operator import mul
from typing import Literal

import torch
from torch import Tensor

from dschat.inference.scheduler import Scheduler
from dschat.inference.sequence import Request, Sequence, StepSchedule

MAX_DRAFT = 16  # tokens of a sequence in a step
MAX_DRAFTED = 512  # in a step, of all sequences: each draws from a row of logits
_CONTEXT = 3  # tokens that must match before a draft
_FIRST_RATE = 0.7  # assumed acceptance before any is known
_SHARE = 0.05  # of one observation in the moving averages

# Tokens are drafted that are accepted with at least this probability. Where a step takes as long as
# it has many rows, which is the worst case, `auto` thus loses at most a quarter.
_WORTH = {"history": 0.25, "auto": 0.8}

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
            key = tuple(sequence.request.ids)
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

    def state_dict(self) -> dict[str, Tensor]:
        """Prompts and their answers, the least recently used first: ``tokens``, end to end, and
        ``sizes``, of each prompt its length, its number of answers and their lengths; 1-D int32.
        """
        tokens, sizes = array("i"), array("i")
        for prompt, answers in self._answers.items():
            sizes.extend([len(prompt), len(answers), *map(len, answers)])
            for ids in (prompt, *answers):
                tokens.extend(ids)
        return {
            "tokens": torch.frombuffer(tokens, dtype=torch.int32),
            "sizes": torch.frombuffer(sizes, dtype=torch.int32),
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        tokens = array("i", state["tokens"].numpy().tobytes())
        sizes, begin = iter(state["sizes"].tolist()), 0
        for length in sizes:
            ends = list(accumulate([length, *islice(sizes, next(sizes))], initial=begin))
            prompt, *answers = (tokens[i:j] for i, j in pairwise(ends))
            self._answers[tuple(prompt)] = list(answers)
            self.num_tokens += sum(map(len, answers))
            begin = ends[-1]


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

    def state_dict(self) -> dict[str, Tensor]:
        counts = torch.tensor(self._counts)
        return {"rates": torch.tensor(self._rates, dtype=torch.float64), "counts": counts}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._rates, self._counts = state["rates"].tolist(), state["counts"].tolist()


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


class Drafter:
    """Drafts for the sequences of one core, from what all cores of the engine share."""

    def __init__(self, scheduler: Scheduler, shared: "Speculation") -> None:
        self._scheduler, self._history = scheduler, shared.history
        self._acceptance, self._worth = shared.acceptance, shared.worth
        self._indices: dict[Request, tuple[bool, dict[_Context, _Place]]] = {}
        self._followers: dict[Sequence, _Follower] = {}

    def draft(self, schedule: StepSchedule) -> None:
        """Set `Sequence.draft` of the sequences that draw a token in a step."""
        budget = min(self._scheduler.draft_budget(schedule), MAX_DRAFTED)
        lengths: dict[tuple[bool, int], int] = {}
        for sequence in schedule.ready:
            f = self._follow(sequence)
            found = len(f.tokens) - f.position
            if found <= 0:
                continue
            state = f.is_known, f.run
            if state not in lengths:
                lengths[state] = self._length(self._acceptance.chances(*state))
            rest = sequence.request.max_new_tokens - len(sequence.answer) - 1
            # Each of the row's sequences draws at each position.
            size = min(lengths[state], found, rest, budget // len(sequence.row))
            if size > 0:
                size = self._scheduler.room_for(sequence, size)
                sequence.draft = list(f.tokens[f.position : f.position + size])
                budget -= size * len(sequence.row)
        schedule.sort_chunks()

    def next_tokens(self, sequence: Sequence, most: int) -> tuple[Tokens[int], int]:
        """Up to ``most`` next tokens of an answer, and how many of them are worth a draft."""
        f = self._follow(sequence)
        tokens = f.tokens[f.position : f.position + most]
        chances = self._acceptance.chances(f.is_known, f.run)
        return tokens, min(len(tokens), self._length(chances))

    def _length(self, chances: list[float]) -> int:
        return sum(chance >= self._worth for chance in chances)

    def ended(self, sequence: Sequence) -> None:
        """Learn from the last tokens of an answer."""
        if sequence in self._followers:
            self._follow(sequence)
            del self._followers[sequence]

    def _follow(self, sequence: Sequence) -> _Follower:
        """Where a sequence is, with all its tokens."""
        request, answer = sequence.request, sequence.answer
        f = self._followers.get(sequence)
        if f is None:
            if request not in self._indices:
                answers = self._history.of(request.ids)
                self._indices[request] = bool(answers), _index(request.ids, answers)
            (is_known, index), context = self._indices[request], _end(request.ids)
            f = _Follower(is_known, context, index, *index.get(context, ((), 0)))
            f.first = len(answer)  # a twin before, or begun earlier: others learned from the rest
            self._followers[sequence] = f
        for i in range(f.known, len(answer)):
            token, is_right = answer[i], False
            if f.position < len(f.tokens):
                is_right = f.tokens[f.position] == token
                if i >= f.first:
                    self._acceptance.add(f.is_known, f.run, is_right)
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


class Speculation:
    """What the cores of an engine draft from. ``mode``: see `EngineConfig.speculate`."""

    def __init__(self, mode: Literal["history", "auto"]) -> None:
        self.worth = _WORTH[mode]  # the least probability that a drafted token is accepted
        self.history, self.acceptance = AnswerHistory(), Acceptance()

    def state_dict(self) -> dict[str, Tensor]:
        """What the next drafts depend on; empty before the first answer."""
        if not self.history.num_tokens:
            return {}
        return self.history.state_dict() | self.acceptance.state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore a `state_dict` of a process without answers."""
        if state:
            self.history.load_state_dict(state)
            self.acceptance.load_state_dict(state)


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
