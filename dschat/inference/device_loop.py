"""Generates with captured decode steps that the host launches ahead of reading their tokens.

Prompts are computed as in `EagerLoop`, in steps of their own. Between them, decode steps follow one
another on the device: each takes its tokens from the one before (`DecodeState`). The host reads
them ``lag`` steps late, while the device computes, so an answer's end is noticed late: its row is
dead on the device by then, and costs padding, not a wrong token. It knows ends by length when it
launches; without stop tokens it knows all ends, and reads when the ring is full or the steps end.

Before sequences are admitted or preempted, all steps are read: the scheduler sees every token.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from dschat.inference.cuda_graphs import DecodeGraphs, Step
from dschat.inference.decode_state import RING
from dschat.inference.eager_loop import EagerLoop
from dschat.inference.sampler import SamplingKind
from dschat.inference.sequence import Event, Sequence
from dschat.observability.device_span import DeviceSpan


@dataclass
class DeviceLoop(EagerLoop):
    """``streaming``: tokens are wanted as soon as they can be read. ``lag``: below `RING`."""

    streaming: bool = False
    lag: int = 1
    _graphs: DecodeGraphs | None = None
    _kind: SamplingKind | None = None
    _replays: dict[int, Step] = field(default_factory=dict)  # of the rows, by width
    _pages: int = 0  # of a row that the steps read
    _rows: list[Sequence] = field(default_factory=list)  # of the steps since `_enter`
    _live: list[tuple[int, Sequence]] = field(default_factory=list)  # that need another step
    _unread: deque[Tensor] = field(default_factory=deque)  # steps that `pause` has read

    def run(self) -> Iterator[Event]:
        """Collective in the tensor-parallel group. Every token, in the order of drawing."""
        scheduler = self.scheduler
        try:
            while scheduler.has_work and not self.until():
                span = DeviceSpan(self.runner.device)
                schedule = scheduler.schedule()
                if schedule.chunks:
                    yield from self.step(schedule, span)
                else:
                    yield from self._decode(schedule.decodes, span)
        finally:
            try:
                self._leave()
            finally:
                scheduler.clear()
                self.stats.finish()

    def _leave(self) -> None:
        """Read what is under way, and give up the rows: their owner keeps the cache alive."""
        if self._graphs is not None and self._graphs.state.owner is self:
            self.pause()
            self._graphs.state.owner = None

    def pause(self) -> None:
        """Read all steps, because another loop needs the state."""
        assert self._graphs is not None
        while self._graphs.state.num_unread:
            self._unread.append(self._graphs.state.read().clone())

    def _decode(self, sequences: list[Sequence], span: DeviceSpan) -> Iterator[Event]:
        """Decode steps until the schedule or the size of the steps must change."""
        graphs = self._enter(sequences)
        ahead = self.lag if self._reads_soon else RING - 1
        proceed = True
        while proceed or self._num_unread(graphs):
            if proceed:
                self._launch(graphs)
            events: list[Event] = []
            while self._num_unread(graphs) > (ahead if proceed else 0):
                events += self._read(graphs)
            if events:
                self.stats.count_decodes(len(events), span.stop())
                yield from events
                span = DeviceSpan(self.runner.device)
            proceed = proceed and self._can_proceed(graphs)

    @property
    def _reads_soon(self) -> bool:
        return bool(self.stops) or self.streaming

    def _enter(self, sequences: list[Sequence]) -> DecodeGraphs:
        """Give each sequence a row. Returns the graphs of these rows."""
        graphs, sampler = self.runner.graphs(self.sampler.num_tokens), self.sampler
        if self._kind is None or graphs is not self._graphs or graphs.state.owner is not self:
            self._kind = graphs.state.acquire(self, sampler.sampling, sampler.stops)
            self._graphs = graphs
        for sequence in sequences:
            sequence.uniforms = []  # the device draws at these positions
        size = graphs.size_for(len(sequences))
        widths = self._widths(graphs, size)
        self._pages = pages = graphs.pages_for(max(len(s.pages) for s in sequences))
        self._replays = {width: graphs.step(size, pages, self._kind, width) for width in widths}
        graphs.state.enter(sequences, sampler.sampling.min_new_tokens)
        self._rows, self._live = sequences, list(enumerate(sequences))
        return graphs

    def _widths(self, graphs: DecodeGraphs, size: int) -> list[int]:
        """Positions of each of ``size`` rows that steps may compute."""
        return [1]

    def _num_unread(self, graphs: DecodeGraphs) -> int:
        owns = graphs.state.owner is self
        return len(self._unread) + (graphs.state.num_unread if owns else 0)

    def _launch(self, graphs: DecodeGraphs) -> None:
        """Run a step; sequences that draw their last token in it need no pages afterwards."""
        graphs.state.launch(self._replays[1])
        if self._reads_soon:
            graphs.state.fetch()
        stats, scheduler = self.stats, self.scheduler
        live = []
        for row, sequence in self._live:
            sequence.computed += 1
            num_drawn = sequence.computed + 1 - len(sequence.prompt.ids)
            if num_drawn < sequence.prompt.max_new_tokens:
                live.append((row, sequence))
            else:  # NOTE: the next user of its pages writes them in a later step
                scheduler.finish(sequence)
        self._live = live
        stats.decode_steps += 1
        stats.follow(scheduler)

    def _read(self, graphs: DecodeGraphs) -> list[Event]:
        """The tokens of the oldest unread step."""
        drawn = self._unread.popleft() if self._unread else graphs.state.read()
        tokens, logprobs = drawn[:, 0, : len(self._rows)].tolist()
        events = []
        for sequence, token, logprob in zip(self._rows, tokens, logprobs, strict=True):
            if is_over(sequence):
                continue  # its row was dead
            events.append(self._append(sequence, int(token), logprob))
            if sequence.stopped and sequence.pages:  # without pages it ended in `_launch`
                self.scheduler.finish(sequence)
        self._live = [(row, sequence) for row, sequence in self._live if sequence.pages]
        return events

    def _can_proceed(self, graphs: DecodeGraphs) -> bool:
        """Whether the same rows can run another step, with pages for its tokens."""
        if not self._live or self.until() or self.scheduler.would_admit:
            return False
        if graphs.state.owner is not self or not self.runner.fits(graphs):
            return False
        if graphs.size_for(len(self._live)) < graphs.size_for(len(self._rows)):
            return False
        for row, sequence in self._live:
            num_pages = len(sequence.pages)
            has_room = self._extend(sequence)
            self._show_pages(graphs, row, sequence, num_pages)
            if not has_room or len(sequence.pages) > self._pages:
                return False
        return True

    def _extend(self, sequence: Sequence) -> bool:
        """Allocate the pages that the next step certainly needs. False: there are too few."""
        return self.scheduler.extend(sequence)

    def _show_pages(
        self, graphs: DecodeGraphs, row: int, sequence: Sequence, num_pages: int
    ) -> None:
        """Give the next step a row's pages after the first ``num_pages``."""
        for i, page in enumerate(sequence.pages[num_pages:], num_pages):
            graphs.state.set_page(row, i, page)


def is_over(sequence: Sequence) -> bool:
    return sequence.stopped or len(sequence.answer) == sequence.prompt.max_new_tokens
