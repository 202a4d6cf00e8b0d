"""Generates with captured steps that compute several positions of a sequence, ahead of the host.

The host guesses the next tokens of each answer from what it has read (`Drafter`), ``lag`` steps
behind the device. A guess is of a position: a step takes those of the positions that it is at by
then, draws at all of them, and advances each row as far as guesses and draws agree, without the
host. So answers do not depend on guesses, nor on how late they are; guesses that a wrong one has
made useless are replaced ``lag`` steps later.

The host knows the position of a row to within the guesses of the steps that it has not read. Pages
are allocated for the farthest one.
"""

from collections import deque
from dataclasses import dataclass, field

from dschat.inference.cuda_graphs import DecodeGraphs
from dschat.inference.decode_state import NO_GUESS, WINDOW, WRONG_GUESS, Guesses
from dschat.inference.device_loop import DeviceLoop, is_over
from dschat.inference.sequence import Event, Sequence
from dschat.inference.speculation import Drafter
from dschat.observability.device_span import DeviceSpan


@dataclass
class GuessingLoop(DeviceLoop):
    """`DeviceLoop` with steps of several widths, chosen by ``drafter``."""

    _pending: deque[int] = field(default_factory=deque)  # widths of the steps that are not read
    _span: DeviceSpan | None = None  # since the last launch
    _timings: deque[tuple[int, DeviceSpan]] = field(default_factory=deque)  # rows, and their step

    @property
    def _reads_soon(self) -> bool:
        return True

    @property
    def _drafter(self) -> Drafter:
        assert self.drafter is not None
        return self.drafter

    def _enter(self, sequences: list[Sequence]) -> DecodeGraphs:
        graphs = super()._enter(sequences)
        self._span = DeviceSpan(self.runner.device)
        return graphs

    def _widths(self, graphs: DecodeGraphs, size: int) -> list[int]:
        widths = graphs.widths(size)
        return [w for w in widths if w == 1 or self._drafter.may_pay(w, size)]

    def _launch(self, graphs: DecodeGraphs) -> None:
        """Run a step. Pages for guesses are taken where they are free."""
        widths, size = list(self._replays), graphs.size_for(len(self._rows))
        width = 1
        if len(widths) > 1:
            guesses = {row: self._drafter.guesses(s, WINDOW) for row, s in self._live}
            found = [chances for _, chances in guesses.values()]
            width = self._drafter.width(found, widths, size)
        if width > 1:
            rows = [Guesses(0, 0, [])] * len(self._rows)
            for row, sequence in self._live:
                num_pages = len(sequence.pages)
                self._reserve(sequence, sum(self._pending) + width - 1)
                self._show_pages(graphs, row, sequence, num_pages)
                room = min(len(sequence.pages), self._pages) * self.scheduler.page_size
                rows[row] = Guesses(room, len(sequence), list(guesses[row][0]))
            graphs.state.guess(rows)
        graphs.state.launch(self._replays[width])
        graphs.state.fetch()
        self._pending.append(width)
        self._time(size * width)
        self.stats.decode_steps += 1
        self.stats.follow(self.scheduler)

    def _time(self, rows: int) -> None:
        """Record the step launched last, and take the time of those that are over."""
        assert self._span is not None
        self._timings.append((rows, self._span.stop()))
        self._span = DeviceSpan(self.runner.device)
        while self._timings and self._timings[0][1].is_over:
            rows, span = self._timings.popleft()
            self._drafter.took(rows, span.seconds())

    def _reserve(self, sequence: Sequence, count: int) -> bool:
        """Allocate pages for ``count`` tokens more, within its limit; whether all are there."""
        rest = sequence.prompt.max_new_tokens - len(sequence.answer) - 1
        count = min(count, rest)
        return self.scheduler.room_for(sequence, count) >= count

    def _extend(self, sequence: Sequence) -> bool:
        return self._reserve(sequence, sum(self._pending))

    def _read(self, graphs: DecodeGraphs) -> list[Event]:
        """The tokens of the oldest unread step."""
        drawn = self._unread.popleft() if self._unread else graphs.state.read()
        width = self._pending.popleft()
        tokens, logprobs = drawn[:, :width, : len(self._rows)].transpose(1, 2).tolist()
        events: list[Event] = []
        num_sequences = num_wrong = 0
        for i, sequence in enumerate(self._rows):
            if is_over(sequence):
                continue  # its row was dead
            num_sequences += 1
            num_wrong += tokens[i].count(WRONG_GUESS)
            for token, logprob in zip(tokens[i], logprobs[i], strict=True):
                if not is_over(sequence) and token not in (NO_GUESS, WRONG_GUESS):
                    events.append(self._append(sequence, int(token), logprob))
            sequence.computed = len(sequence) - 1
            if is_over(sequence):
                self.scheduler.finish(sequence)
                self._drafter.ended(sequence)
        accepted = len(events) - num_sequences
        self.stats.count_drafts(accepted + num_wrong, accepted)
        self._live = [(row, sequence) for row, sequence in self._live if sequence.pages]
        return events
