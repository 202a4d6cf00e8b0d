"""Answers requests together: schedules, computes, draws, and waits for the tokens of each step.

Every request has its own sampling and end tokens, and its answers are those that it would have
alone. `generate`, `stream`, partial rollouts, the server and episodes all call a `Core`.
"""

import threading
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from dschat.config import UserError
from dschat.distributed import RankGroup
from dschat.inference.model.kv_cache import KVCache
from dschat.inference.requests.sampler import Place, Sampler
from dschat.inference.requests.scheduler import Scheduler
from dschat.inference.requests.sequence import Event, Request, Sequence, StepSchedule
from dschat.inference.requests.stats import DeviceSpan, GenerationStats
from dschat.inference.requests.step_runner import StepRunner

T = TypeVar("T")

_DRAWN_TOGETHER = 1 << 22  # copied logits, at least
_FORCED = 1 << 25  # logits of forced tokens in a step


class Engine(Protocol):
    """What a `Core` asks of the engine whose requests it answers."""

    stats: GenerationStats
    lock: threading.RLock
    group: RankGroup
    device: torch.device
    stop_ids: tuple[int, ...]
    num_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int

    @property
    def cache(self) -> KVCache: ...
    @property
    def keeps_apart(self) -> tuple[bool, bool]: ...
    def problem(self, requests: list[Request]) -> str | None: ...
    def step_runner(self) -> StepRunner: ...


class Core:
    """The requests that ``engine`` answers together, step by step.

    Between two steps, requests may be added and cancelled. The ranks of a tensor-parallel group
    take the same steps, with the requests of all of them: they add with `add_all`. Several cores of
    an engine share its cache.

    Args:
        streaming: tokens are wanted as soon as they can be read.
    """

    def __init__(self, engine: Engine, streaming: bool = False) -> None:
        self._engine, self._lock, self._streaming = engine, engine.lock, streaming
        cache, sizes = engine.cache, (engine.max_num_seqs, engine.max_num_batched_tokens)
        self._scheduler = Scheduler(cache, *sizes, *engine.keeps_apart)
        self.stats = engine.stats = self._scheduler.stats
        self._sampler = Sampler(engine.num_tokens, engine.device, engine.group)
        self._made_runner: StepRunner | None = None

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    # -- requests ----------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            UserError: an empty prompt, an id outside the vocabulary, or a prompt too long for the
                cache or the model.
        """
        if (problem := self._engine.problem([request])) is not None:
            raise UserError(problem)
        self._queue([request])

    def add_all(self, requests: list[Request], more: T) -> list[tuple[list[Request], T]]:
        """Collective in the group. Queue the requests of every rank, in rank order.

        Returns them by rank, with what each rank gives as ``more``. This rank's own are the given
        ones.

        Raises:
            UserError: as `add`, on all ranks.
        """
        group = self._engine.group
        pooled = group.gather_objects((self._engine.problem(requests), requests, more))
        for problem, *_ in pooled:
            if problem is not None:
                raise UserError(problem)
        by_rank = [(theirs, value) for _, theirs, value in pooled]
        by_rank[group.rank] = requests, more
        self._queue([request for part, _ in by_rank for request in part])
        return by_rank

    def _queue(self, requests: list[Request]) -> None:
        with self._lock:
            for request in requests:
                request.ids = list(request.ids)  # the caller may extend its own
                self._sampler.prepare(request, self._engine.stop_ids)
            self.stats.prompts += sum(not request.sequences[0].answer for request in requests)
            if requests and self._made_runner is None:
                # NOTE: before the scheduler finds pages of weights that have been replaced.
                self._made_runner = self._engine.step_runner()
            self._scheduler.add(s for r in requests for s in r.sequences if not s.is_over)

    def cancel(self, request: Request, sample: int | None = None) -> None:
        """End a request, or one of its answers."""
        with self._lock:
            self._scheduler.drop(request, sample)

    def close(self) -> None:
        """Cancel all requests. Others may be added."""
        with self._lock:
            self._scheduler.clear()
            self.stats.finish()

    # -- steps -------------------------------------------------------------------------------------

    def events(self, until: Callable[[], bool] = lambda: False) -> Iterator[Event]:
        """Collective in the group. Every token until all requests are answered, in the order of
        drawing, or until ``until`` says so between two steps.
        """
        while self.has_work and not until():
            yield from self.step()
        yield from self.settle()

    def step(self) -> list[Event]:
        """Collective in the group. The tokens that the next step makes known."""
        with self._lock:
            span = DeviceSpan(self._engine.device)
            return self._compute(self._scheduler.schedule(), span)

    def settle(self) -> list[Event]:
        """The tokens that steps have drawn and nobody has read: none, where each step is read."""
        return []

    @property
    def _runner(self) -> StepRunner:
        assert self._made_runner is not None, "nothing was added"
        return self._made_runner

    def _compute(self, schedule: StepSchedule, span: DeviceSpan) -> list[Event]:
        """The tokens of one step, computed at once."""
        scheduler, stats = self._scheduler, self.stats
        self._add_forced(schedule)
        ready, logits = schedule.ready, self._runner.logits(schedule)
        scheduler.computed(schedule)
        rows = [s.row for s in ready]
        tokens, logprobs = self._draw(rows, logits)
        stats.count(schedule, span.stop())
        events = self._advance(rows, tokens, logprobs)
        stats.count_draws(bool(schedule.chunks), len(events))
        return events

    def _add_forced(self, schedule: StepSchedule) -> None:
        """Let the step compute the next forced tokens of its sequences, too."""
        budget = min(self._scheduler.spare_tokens(schedule), _FORCED // self._engine.num_tokens)
        for s in schedule.ready:
            if s.num_drawn >= 0:
                continue
            rest = min(-s.num_drawn, s.request.max_new_tokens - len(s.answer) - 1)
            size = self._scheduler.room_for(s, max(0, min(rest, budget // len(s.row))))
            for one in s.row:
                one.forced = s.request.forced[len(s.answer) :][:size]
            budget -= size * len(s.row)

    def _draw(self, rows: list[list[Sequence]], logits: Tensor) -> tuple[list[int], list[float]]:
        """The forced tokens of each sequence in this step and the one after them, and log-probs.

        ``rows``: sequences that share rows of the logits.
        """
        places: list[Place] = [
            (s, ahead) for row in rows for s in row for ahead in range(len(s.forced) + 1)
        ]
        if not places:
            return [], []
        if len(places) == len(logits):
            return self._sampler.draw(logits, places)
        row_of_place: list[int] = []
        first = 0
        for row in rows:
            end = first + len(row[0].forced) + 1
            row_of_place += [*range(first, end)] * len(row)
            first = end
        # On a CPU repeat_interleave starts all threads: 0.1 ms.
        index = torch.tensor(row_of_place, device=logits.device)
        tokens: list[int] = []
        logprobs: list[float] = []
        # Many samples take no more memory than many prompts.
        size = max(len(logits), _DRAWN_TOGETHER // logits.shape[1])
        for first in range(0, len(places), size):
            part = slice(first, first + size)
            drawn = self._sampler.draw(logits.index_select(0, index[part]), places[part])
            tokens += drawn[0]
            logprobs += drawn[1]
        return tokens, logprobs

    def _advance(
        self, rows: list[list[Sequence]], tokens: list[int], logprobs: list[float]
    ) -> list[Event]:
        """Append the drawn tokens, and split rows whose answers differ now."""
        events: list[Event] = []
        place = 0
        for row in rows:
            unfinished = []
            for sequence in row:
                end = place + len(sequence.forced) + 1
                for token, logprob in zip(tokens[place:end], logprobs[place:end], strict=True):
                    events.append(self._append(sequence, token, logprob))
                place, sequence.forced = end, []
                if not sequence.is_over:
                    unfinished.append(sequence)
                else:
                    self._keep_experts(sequence, row[0].pages, len(sequence) - 1)
            first = row[0]
            if len(row) > 1 or not unfinished:
                self._scheduler.split_row(first, unfinished)
            else:
                first.computed = len(first) - 1
        return events

    def _keep_experts(self, sequence: Sequence, pages: list[int], num_tokens: int) -> None:
        """Take the experts of an answer's tokens from the cache, before its pages are free."""
        sequence.experts = self._engine.cache.experts_of(pages, num_tokens)

    def _append(self, sequence: Sequence, token: int, logprob: float) -> Event:
        sequence.answer.append(token)
        sequence.logprobs.append(logprob)
        if sequence.uniforms:  # greedy decoding has none
            sequence.uniforms.pop()
        is_drawn = sequence.num_drawn > 0
        sequence.stopped = is_drawn and token in sequence.request.draws.end_ids
        return Event(sequence, token, logprob, sequence.is_over)
