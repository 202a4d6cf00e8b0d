"""Generates step by step: schedule, compute, draw, and wait for the tokens before the next step."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dschat.inference.sampler import Sampler
from dschat.inference.scheduler import Scheduler
from dschat.inference.sequence import Event, Sequence, StepSchedule
from dschat.inference.speculation import Drafter
from dschat.inference.stats import GenerationStats
from dschat.inference.step_runner import StepRunner
from dschat.observability.device_span import DeviceSpan

_DRAWN_TOGETHER = 1 << 22  # copied logits, at least


@dataclass
class EagerLoop:
    """Runs the queue of ``scheduler`` to its end, or to where ``until`` says so after a step.

    ``stops``: tokens that end an answer.
    """

    runner: StepRunner
    scheduler: Scheduler
    sampler: Sampler
    stats: GenerationStats
    stops: frozenset[int]
    until: Callable[[], bool] = lambda: False
    drafter: Drafter | None = None

    def run(self) -> Iterator[Event]:
        """Collective in the tensor-parallel group. Every token, in the order of drawing."""
        scheduler = self.scheduler
        try:
            while scheduler.has_work and not self.until():
                span = DeviceSpan(self.runner.device)
                yield from self.step(scheduler.schedule(), span)
        finally:
            scheduler.clear()
            self.stats.finish()

    def step(self, schedule: StepSchedule, span: DeviceSpan) -> list[Event]:
        """Collective in the tensor-parallel group. The tokens of one step."""
        scheduler, stats = self.scheduler, self.stats
        if self.drafter is not None:
            self.drafter.propose(schedule)
        started = time.perf_counter()
        ready, logits = schedule.ready, self.runner.logits(schedule)
        scheduler.computed(schedule)
        rows = [s.row for s in ready]
        num_drafted = sum(len(s.draft) for s in ready)
        tokens, logprobs = self._draw(rows, logits)
        stats.count(schedule, span.stop())
        events = self._advance(rows, tokens, logprobs)
        num_sequences = sum(map(len, rows))
        drafted, accepted = len(tokens) - num_sequences, len(events) - num_sequences
        stats.count_draws(schedule, len(events), drafted, accepted)
        stats.follow(scheduler)
        if self.drafter is not None:
            seconds, is_prefill = time.perf_counter() - started, bool(schedule.chunks)
            self.drafter.took(schedule.num_tokens + num_drafted, seconds, is_prefill)
            for sequence, _, is_last in events:
                if is_last:
                    self.drafter.ended(sequence)
        return events

    def is_end(self, sequence: Sequence, token: int) -> bool:
        return token in self.stops

    def _draw(self, rows: list[list[Sequence]], logits: Tensor) -> tuple[list[int], list[float]]:
        """Draw a token for each sequence, and each token of its row's draft.

        ``rows``: sequences that share rows of the logits, first the one that has the draft.
        """
        for row in rows:
            for twin in row[1:]:
                twin.draft = row[0].draft
        places = [(s, ahead) for row in rows for s in row for ahead in range(len(s.draft) + 1)]
        if not places:
            return [], []
        if len(places) == len(logits):
            return self.sampler.draw(logits, places)
        row_of_place: list[int] = []
        first = 0
        for row in rows:
            end = first + len(row[0].draft) + 1
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
            drawn = self.sampler.draw(logits.index_select(0, index[part]), places[part])
            tokens += drawn[0]
            logprobs += drawn[1]
        return tokens, logprobs

    def _advance(
        self, rows: list[list[Sequence]], tokens: list[int], logprobs: list[float]
    ) -> list[Event]:
        """Append the drawn tokens; a row goes on as one for each answer that it has now.

        Of a sequence with a draft, up to the first token that differs from the draft: those after
        it were drawn from logits of other tokens.
        """
        events: list[Event] = []
        place = 0
        for row in rows:
            unfinished = []
            for sequence in row:
                draft, sequence.draft = sequence.draft, []
                for i, drafted in enumerate((*draft, None)):
                    event = self._append(sequence, tokens[place + i], logprobs[place + i])
                    events.append(event)
                    if event[2] or drafted != event[1]:
                        break
                place += len(draft) + 1
                if not event[2]:
                    unfinished.append(sequence)
            first = row[0]
            if len(row) > 1 or not unfinished:
                self.scheduler.go_on(first, unfinished)
            else:
                first.computed = len(first) - 1
        return events

    def _append(self, sequence: Sequence, token: int, logprob: float) -> Event:
        sequence.answer.append(token)
        sequence.logprobs.append(logprob)
        if sequence.uniforms:  # greedy decoding has none
            sequence.uniforms.pop()
        sequence.stopped = self.is_end(sequence, token)
        is_last = sequence.stopped or len(sequence.answer) == sequence.prompt.max_new_tokens
        return sequence, token, is_last
