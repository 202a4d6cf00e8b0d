"""Defines what an engine works on: requests, their sequences, and the work of one step."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from dschat.inference.model.kv_cache import Key
from dschat.inference.protocol import FinishReason, Rollout, SamplingParams


@dataclass(eq=False)
class Draws:
    """What the draws of several requests have in common: all of a sampling but its seed."""

    sampling: SamplingParams  # of the first of these requests
    end_ids: frozenset[int]  # tokens that end an answer
    stops: list[int]  # the `end_ids` that can be drawn
    stops_K: Tensor  # the same on the device, int64


@dataclass(eq=False)
class Request:
    """A prompt to answer ``sampling.n`` times.

    Attributes:
        number: of the prompt in the whole rollout, on which random numbers depend.
        limit: most tokens of an answer; None: the sampling's.
        first_sample, first_position: of an answer that continues an earlier turn: its random
            numbers follow on from there.
        num_top: likeliest tokens to record at each position of the answers.
        forced: tokens that every answer begins with: not drawn, but computed with their log-probs.
            A limit does not count them.
        shape: from a sequence and the logits (V,) of its next token the logits to draw it from, in
            a new tensor. The log-prob is by the logits that came in.
        top: those tokens and their log-probs, by sample and position.
        sequences: the answers so far, by sample.
        draws: set when it is added to a core.
    """

    ids: list[int]
    sampling: SamplingParams
    number: int = 0
    limit: int | None = None
    first_sample: int = 0
    first_position: int = 0
    num_top: int = 0
    forced: list[int] = field(default_factory=list)
    shape: "Callable[[Sequence, Tensor], Tensor] | None" = None
    top: dict[int, list[list[tuple[int, float]]]] = field(default_factory=dict)
    max_new_tokens: int = field(init=False)
    sequences: "list[Sequence]" = field(init=False)
    draws: Draws = field(init=False)

    def __post_init__(self) -> None:
        default = self.sampling.max_new_tokens
        self.max_new_tokens = len(self.forced) + (default if self.limit is None else self.limit)
        self.sequences = [Sequence(self, i) for i in range(self.sampling.n)]

    def resume(self, answers: Iterable[tuple[list[int], list[float], bool]]) -> None:
        """Continue ``answers``: of each sample the tokens, their log-probs and whether it has
        stopped.
        """
        for sequence, (tokens, logprobs, stopped) in zip(self.sequences, answers, strict=True):
            sequence.answer, sequence.logprobs = list(tokens), list(logprobs)
            sequence.stopped = stopped

    @property
    def is_plain(self) -> bool:
        """Whether every token is drawn as ``sampling`` alone says, and nothing else is recorded."""
        return not (self.num_top or self.forced or self.shape)

    @property
    def is_complete(self) -> bool:
        return all(sequence.is_over for sequence in self.sequences)

    def rollout(self) -> Rollout:
        """The answers, all of which are complete."""
        rows = self.sequences
        reasons = [reason for s in rows if (reason := s.finish_reason) is not None]
        experts = [s.experts.cpu() for s in rows if s.experts is not None]
        answers = [s.answer for s in rows], [s.logprobs for s in rows], reasons
        return Rollout(*answers, experts=experts if len(experts) == len(rows) else None)


@dataclass(eq=False)
class Sequence:
    """An answer to a request: its tokens so far and their pages.

    ``twins``: other answers to the request with the same tokens so far. They have no pages: what
    this one computes is theirs too, and they draw from the same row of logits. ``experts``: see
    `Rollout`, of a complete answer.
    """

    request: Request
    sample: int
    answer: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stopped: bool = False
    pages: list[int] = field(default_factory=list)
    slot: int | None = None  # of its recurrent state
    computed: int = 0
    forced: list[int] = field(default_factory=list)  # the next of `Request.forced`, for one step
    uniforms: list[float] = field(default_factory=list)  # of the answer's next positions
    next_key: Key | None = None  # of the first page that it computes itself
    twins: list["Sequence"] = field(default_factory=list)
    experts: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:  # for other ranks, which do not read the experts
        return vars(self) | {"experts": None}

    def __len__(self) -> int:
        return len(self.request.ids) + len(self.answer)

    @property
    def num_drawn(self) -> int:
        """Tokens of the answer after the forced ones; negative before these are all computed."""
        return len(self.answer) - len(self.request.forced)

    @property
    def is_over(self) -> bool:
        return self.stopped or len(self.answer) == self.request.max_new_tokens

    @property
    def finish_reason(self) -> FinishReason | None:
        """None: it goes on."""
        if self.stopped:
            return "stop"
        return "length" if self.is_over else None

    @property
    def row(self) -> list["Sequence"]:
        """The sequences that draw from its row: itself and its twins."""
        return [self, *self.twins]

    @property
    def findable(self) -> list[int]:
        """Tokens that may be taken from the cache: all but the last, whose logits are needed."""
        return self.tokens(0, len(self) - 1)

    def tokens(self, first: int, last: int) -> list[int]:
        ids, num_ids = self.request.ids, len(self.request.ids)
        if first >= num_ids:
            return self.answer[first - num_ids : last - num_ids]
        return ids[first:last] + self.answer[: max(0, last - num_ids)]


def rows_of(sequences: Iterable[Sequence], apart: bool, known: int = 0) -> list[Sequence]:
    """Make those with the same tokens a row; returns the first one of each.

    ``apart``: not those that have drawn a token. ``known``: the first tokens of the answers, which
    are the same.
    """
    alike: dict[object, list[Sequence]] = {}
    for s in sequences:
        own = s.sample if apart and s.answer else None
        alike.setdefault((s.request, own, *s.answer[known:]), []).append(s)
    for first, *twins in alike.values():
        first.twins = twins
    return [row[0] for row in alike.values()]


@dataclass
class StepSchedule:
    """The sequences of one step: each decode computes one token, each chunk a number of tokens, and
    those whose tokens are all computed then `Sequence.forced`.
    """

    decodes: list[Sequence]
    chunks: list[tuple[Sequence, int]]

    @property
    def ready(self) -> list[Sequence]:
        """Sequences whose tokens are all computed after the step, in row order: each gets a token,
        and one more for each of `Sequence.forced`.
        """
        return self.decodes + [s for s, count in self.chunks if s.computed + count == len(s)]

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes, without `Sequence.forced`."""
        return len(self.decodes) + sum(count for _, count in self.chunks)


class Event(NamedTuple):
    """A token drawn, its log-prob, and whether it is the sequence's last one."""

    sequence: Sequence
    token: int
    logprob: float
    is_last: bool
