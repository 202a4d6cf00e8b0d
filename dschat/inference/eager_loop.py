"""Generates step by step: schedule, compute, draw, and wait for the tokens before the next step."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dschat.inference.sampler import Sampler
from dschat.inference.scheduler import Scheduler, Sequence, StepSchedule
from dschat.inference.stats import GenerationStats
from dschat.inference.step_runner import StepRunner
from dschat.observability.device_span import DeviceSpan

Event = tuple[Sequence, int, bool]  # a token drawn, and whether it is the sequence's last one


@dataclass
class EagerLoop:
    """Runs the queue of ``scheduler`` to its end. ``stops``: tokens that end an answer."""

    runner: StepRunner
    scheduler: Scheduler
    sampler: Sampler
    stats: GenerationStats
    stops: frozenset[int]

    def run(self) -> Iterator[Event]:
        """Collective in the tensor-parallel group. Every token, in the order of drawing."""
        scheduler = self.scheduler
        try:
            while scheduler.has_work:
                span = DeviceSpan(self.runner.device)
                yield from self._step(scheduler.schedule(), span)
        finally:
            scheduler.clear()
            self.stats.finish()

    def _step(self, schedule: StepSchedule, span: DeviceSpan) -> list[Event]:
        scheduler, stats = self.scheduler, self.stats
        ready, logits = schedule.ready, self.runner.logits(schedule)
        scheduler.computed(schedule)
        rows = [scheduler.spawn(s) for s in ready]
        tokens, logprobs = self._draw(rows, logits)
        stats.count(schedule, len(tokens), span.stop())
        events = self._advance(rows, tokens, logprobs)
        stats.follow(scheduler)
        return events

    def _draw(self, rows: list[list[Sequence]], logits: Tensor) -> tuple[list[int], list[float]]:
        """Draw one token per sequence. ``rows[r]``: sequences that share row r of the logits."""
        sequences = [s for row in rows for s in row]
        if not sequences:
            return [], []
        if len(sequences) > len(rows):
            repeats = torch.tensor([len(row) for row in rows], device=logits.device)
            # NOTE: without its size, the host would wait for the device to learn it.
            logits = logits.repeat_interleave(repeats, dim=0, output_size=len(sequences))
        return self.sampler.draw(logits, sequences)

    def _advance(
        self, rows: list[list[Sequence]], tokens: list[int], logprobs: list[float]
    ) -> list[Event]:
        """Append the drawn tokens; finish sequences, and queue the other samples of new prompts."""
        drawn = iter(zip(tokens, logprobs, strict=True))
        events = []
        for row in rows:
            unfinished = []
            for sequence in row:
                event = self._append(sequence, *next(drawn))
                events.append(event)
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
        sequence.stopped = token in self.stops
        is_last = sequence.stopped or len(sequence.answer) == sequence.prompt.max_new_tokens
        return sequence, token, is_last
