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
        rows = [scheduler.spawn(s) for s in ready]
        tokens, logprobs = self._draw(rows, logits)
        stats.count(schedule, span.stop())
        events = self._advance(rows, tokens, logprobs)
        num_sequences = sum(map(len, rows))
        drafted, accepted = len(tokens) - num_sequences, len(events) - num_sequences
        stats.count_draws(schedule, len(events), drafted, accepted)
        stats.follow(scheduler)
        if self.drafter is not None:
            seconds, is_prefill = time.perf_counter() - started, bool(schedule.chunks)
            self.drafter.took(schedule.num_tokens + drafted, seconds, is_prefill)
            for sequence, _, is_last in events:
                if is_last:
                    self.drafter.ended(sequence)
        return events

    def is_end(self, sequence: Sequence, token: int) -> bool:
        return token in self.stops

    def _draw(self, rows: list[list[Sequence]], logits: Tensor) -> tuple[list[int], list[float]]:
        """Draw a token for each sequence and each token of its draft. ``rows[r]``: sequences that
        share a row of the logits; they have no drafts.
        """
        places = [(s, ahead) for row in rows for s in row for ahead in range(len(s.draft) + 1)]
        if not places:
            return [], []
        if len(places) > len(logits):
            uses = [n for row in rows for n in [len(row)] + [1] * len(row[0].draft)]
            # On a CPU repeat_interleave starts all threads: 0.1 ms.
            row_of_place = [i for i, n in enumerate(uses) for _ in range(n)]
            logits = logits.index_select(0, torch.tensor(row_of_place, device=logits.device))
        return self.sampler.draw(logits, places)

    def _advance(
        self, rows: list[list[Sequence]], tokens: list[int], logprobs: list[float]
    ) -> list[Event]:
        """Append the drawn tokens; finish sequences, and queue the other samples of new prompts.

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
                sequence.computed += i
                place += len(draft) + 1
                if not event[2]:
                    unfinished.append(sequence)
            first = row[0]
            if len(row) > 1:
                self.scheduler.queue_samples(first, [s for s in unfinished if s is not first])
            if first not in unfinished:
                self.scheduler.finish(first)
        return events

    def _append(self, sequence: Sequence, token: int, logprob: float) -> Event:
        sequence.answer.append(token)
        sequence.logprobs.append(logprob)
        del sequence.uniforms[-1:]  # NOTE: greedy decoding has none
        sequence.stopped = self.is_end(sequence, token)
        is_last = sequence.stopped or len(sequence.answer) == sequence.prompt.max_new_tokens
        return sequence, token, is_last
