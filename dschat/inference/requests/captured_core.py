"""Answers requests with captured decode steps that the host launches ahead of reading their tokens.

Prompts are computed as in `Core`, in steps of their own. Between them, decode steps follow one
another on the device: each takes its tokens from the one before (`DecodeState`). The host reads
them ``lag`` steps late, while the device computes, so an answer's end is noticed late: its row is
dead on the device by then, and costs padding, not a wrong token. It knows ends by length when it
launches; without stop tokens it knows all ends, and reads when the ring is full or the steps end.

Before sequences are admitted or preempted, all steps are read: the scheduler sees every token.
"""

from collections import deque
from functools import partial
from typing import Any

from torch import Tensor

from dschat.inference.requests.core import Core
from dschat.inference.requests.cuda_graphs import DecodeGraphs, Step
from dschat.inference.requests.decode_state import RING, DecodeState
from dschat.inference.requests.sampler import SamplingKind
from dschat.inference.requests.sequence import Event, Request, Sequence
from dschat.inference.requests.stats import DeviceSpan


class CapturedCore(Core):
    """See `Core`. A request that is not plain is decoded at once, and all others beside it."""

    lag = 1  # steps that are launched before one is read; below `RING`

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._graphs: DecodeGraphs | None = None
        self._replay: Step | None = None  # of the rows
        self._pages = 0  # of a row that the steps read
        self._rows: list[Sequence] = []  # of the steps since `_enter`
        self._live: list[tuple[int, Sequence]] = []  # that need another step
        self._cancelled: set[Sequence] = set()  # of the rows
        self._unread: deque[Tensor] = deque()  # steps that `pause` has read
        self._span: DeviceSpan | None = None  # since tokens were read

    @property
    def has_work(self) -> bool:
        return bool(self._num_unread) or super().has_work

    def cancel(self, request: Request, sample: int | None = None) -> None:
        """See `Core.cancel`. Steps that run are read first: they write to the request's pages."""
        with self._lock:
            if any(s.request is request for _, s in self._live):
                self.pause()
                self._live = []
            super().cancel(request, sample)
            mine = (s for s in self._rows if s.request is request)
            self._cancelled.update(s for s in mine if sample in (None, s.sample))

    def close(self) -> None:
        """See `Core.close`. The steps are no longer this core's, which keeps the cache alive."""
        with self._lock:
            try:
                self.pause()
            finally:
                if self._owns_steps:
                    self._state.owner = None
                self._unread.clear()
                self._live = []
                super().close()

    def pause(self) -> None:
        """Read all steps, because another core needs the state, or the pages of a row; recurrent
        states return to their slots.
        """
        while self._owns_steps and self._state.num_unread:
            self._unread.append(self._state.read().clone())
        self._leave()

    def _leave(self) -> None:
        if self._graphs is not None and self._owns_steps:
            self._graphs.leave()

    def step(self) -> list[Event]:
        """See `Core.step`. No tokens, while the steps launched so far are fewer than ``lag``."""
        with self._lock:
            self._span = self._span or DeviceSpan(self._engine.device)
            if not self._can_proceed():
                # The host is `lag` steps behind the device: it must know all tokens before the
                # scheduler, which counts them, may change which sequences run.
                events = self.settle()
                if events or not self._scheduler.has_work:
                    return events
                schedule = self._scheduler.schedule()
                if schedule.chunks or not all(s.request.is_plain for s in schedule.decodes):
                    span, self._span = self._span, None
                    return self._compute(schedule, span)
                self._enter(schedule.decodes)
            self._launch()
            return self._read(self.lag if self._reads_soon else RING - 1)

    def settle(self) -> list[Event]:
        """The tokens of all steps that were launched. The next step may be of other rows."""
        with self._lock:
            self._live = []
            self._leave()
            return self._read(0)

    @property
    def _state(self) -> DecodeState:
        assert self._graphs is not None
        return self._graphs.state

    @property
    def _owns_steps(self) -> bool:
        return self._graphs is not None and self._graphs.state.owner is self

    @property
    def _num_unread(self) -> int:
        """Steps that were launched, and whose tokens are not known."""
        return len(self._unread) + (self._state.num_unread if self._owns_steps else 0)

    @property
    def _reads_soon(self) -> bool:
        """Whether it takes the tokens to know which rows need another step."""
        stops = any(sequence.request.draws.end_ids for sequence in self._rows)
        return stops or self._streaming

    def _enter(self, sequences: list[Sequence]) -> None:
        """Give each sequence a row."""
        graphs = self._runner.graphs(self._sampler.num_tokens)
        if graphs is not self._graphs or not self._owns_steps:
            graphs.state.acquire(self)
            self._graphs = graphs
        for sequence in sequences:
            sequence.uniforms = []  # the device draws at these positions
        # Size, pages and kind choose the graph; `enter` fills in the memory that it reads.
        size, kind = graphs.size_for(len(sequences)), SamplingKind.of(sequences)
        self._pages = pages = graphs.pages_for(max(len(s.pages) for s in sequences))
        self._replay = graphs.step(size, pages, kind)
        graphs.enter(sequences, kind)
        self._rows, self._live = sequences, list(enumerate(sequences))
        self._cancelled.clear()

    def _launch(self) -> None:
        """Run a step."""
        assert self._replay is not None
        self._state.launch(self._replay)
        self._count_on()
        if self._reads_soon:
            self._state.fetch()
        self.stats.decode_steps += 1

    def _count_on(self) -> None:
        """Each row has one token more; those that have their last one need no pages."""
        live = []
        for row, sequence in self._live:
            sequence.computed += 1
            num_drawn = sequence.computed + 1 - len(sequence.request.ids)
            if num_drawn < sequence.request.max_new_tokens:
                live.append((row, sequence))
            else:  # NOTE: the next user of its pages writes them in a later step
                ended = sequence, sequence.pages, sequence.computed
                self._state.queue.put(partial(self._keep_experts, *ended))
                self._scheduler.finish(sequence)
        self._live = live

    def _read(self, ahead: int) -> list[Event]:
        """The tokens of the steps that were launched, but of the last ``ahead`` ones."""
        events: list[Event] = []
        span = self._span or DeviceSpan(self._engine.device)
        while self._num_unread > ahead:
            events += self._read_oldest()
        if events:
            self.stats.add_seconds(False, span.stop())
            self._span = None
        return events

    def _read_oldest(self) -> list[Event]:
        drawn = self._unread.popleft() if self._unread else self._state.read()
        tokens, logprobs = drawn[:, : len(self._rows)].tolist()
        events: list[Event] = []
        for sequence, token, logprob in zip(self._rows, tokens, logprobs, strict=True):
            if sequence.is_over or sequence in self._cancelled:
                continue  # its row was dead, or nobody waits for it
            events.append(self._append(sequence, int(token), logprob))
            if events[-1].is_last and sequence.pages:  # without pages it ended in `_count_on`
                self._keep_experts(sequence, sequence.pages, len(sequence) - 1)
                self._scheduler.finish(sequence)
        self.stats.count_draws(False, len(events))
        self.stats.decoded_rows += len(events)
        self._live = [(row, sequence) for row, sequence in self._live if sequence.pages]
        return events

    def _can_proceed(self) -> bool:
        """Whether the same rows can run another step, with pages for its tokens."""
        if not self._live or self._scheduler.would_admit:
            return False
        graphs = self._graphs
        if graphs is None or not self._owns_steps or not graphs.is_current:
            return False
        if graphs.size_for(len(self._live)) < graphs.size_for(len(self._rows)):
            return False
        for row, sequence in self._live:
            num_pages = len(sequence.pages)
            # A page that is added on the host reaches the device's table with the next launch.
            has_room = self._scheduler.extend(sequence)
            if len(sequence.pages) > num_pages:
                self._state.set_page(row, num_pages, sequence.pages[-1])
            if not has_room or len(sequence.pages) > self._pages:
                return False
        return True
