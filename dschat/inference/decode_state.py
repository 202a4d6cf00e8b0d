"""Holds what captured decode steps read and write, at fixed addresses.

A row is a sequence: its newest token, position, limits and block table. A step reads them, draws,
writes token and log-prob into a ring and advances the rows, without a number from the host. The
host writes rows in one copy before the next step, and reads the ring later.

A step may compute several positions of each row: its newest token and a draft of those after it.
It draws at all of them and keeps the draft as far as it equals the draws, so that a draft, even one
for positions that have passed, decides nothing but how far a row advances.

Shapes: S rows, B of them in a step, W pages of the longest sequence, R slots of the ring; Q
positions of a row in a step.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dschat.inference.kernels.cuda import Field
from dschat.inference.kernels.cuda.dispatch import StepKernels
from dschat.inference.sampler import SamplingKind, StepSampling, upload
from dschat.inference.sequence import Sequence

RING = 128  # steps that may run before the host reads the first one
WINDOW = 32  # tokens of a draft, of which a step takes some: the host knows no row's position
NO_DRAFT, REJECTED = -1, -2  # in the ring, instead of a token

Wait = Callable[[], None]


class Owner(Protocol):
    def pause(self) -> None:
        """Read all steps: another owner will overwrite the rows."""


class RowDraft(NamedTuple):
    """The host's draft of a row's next tokens."""

    room: int  # positions that its pages hold
    first: int  # position of the first token
    tokens: list[int]  # at most `WINDOW`


class StepRows(NamedTuple):
    """Inputs of a step of B rows with Q positions each. Dead rows are at position 0 of the trash
    page, and what is not drafted is written there.
    """

    tokens: Tensor  # (B Q,)
    positions: Tensor  # (B Q,)
    lengths: Tensor  # (B Q,) keys that each attends to
    slots: Tensor  # (B Q,) of its new key and value
    table: Tensor  # (B, W); by kernels, also what dead rows had
    key: Tensor | tuple[Tensor, ...]  # prompt, sample, place in the answer: (B Q,) each
    too_short: Tensor  # (B Q,) bool
    drafted: Tensor | None = None  # (B, Q - 1); None: Q is 1
    is_drafted: Tensor | None = None  # (B, Q - 1) bool


class DeviceQueue:
    """The current stream of ``device``. On a CPU, work is done at once."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"

    def put(self, work: Callable[[], object]) -> None:
        """Queue ``work``, which returns before the device has done it."""
        work()

    def mark(self) -> Wait:
        """A function that waits until all work queued so far is done."""
        if not self._is_cuda:
            return lambda: None
        event = torch.cuda.Event()
        event.record()
        return event.synchronize


class DecodeState:
    """``num_rows`` sequences of at most ``num_pages`` pages each; rows without one use
    ``trash_page``, of ``page_size`` tokens. ``width``: the most positions of a row in a step.
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        num_rows: int,
        num_pages: int,
        page_size: int,
        trash_page: int,
        device: torch.device,
        queue: DeviceQueue | None = None,
        width: int = 1,
    ) -> None:
        self.num_rows, self.num_pages = num_rows, num_pages
        self._page_size, self._trash_page = page_size, trash_page
        self.queue = queue or DeviceQueue(device)
        pinned = device.type == "cuda"
        size = num_rows * (len(Field) + num_pages)
        shapes = (len(Field), num_rows), (num_rows, num_pages)

        def split(packed: Tensor) -> tuple[Tensor, Tensor]:
            fields, table = packed.split([len(Field) * num_rows, num_rows * num_pages])
            return fields.view(shapes[0]), table.view(shapes[1])

        self._packed = torch.zeros(size, dtype=torch.int64, device=device)
        self.fields, self.table = split(self._packed)  # (9, S) and (S, W)
        self._written = torch.zeros(size, dtype=torch.int64, pin_memory=pinned)
        self._host_fields, self._host_table = split(self._written)
        self._has_new_pages = False
        self.sampling = StepSampling(num_rows, device)
        ring = RING, 2, width, num_rows
        self.ring = torch.zeros(ring, dtype=torch.float64, device=device)
        self._host_ring = torch.zeros(ring, dtype=torch.float64, pin_memory=pinned)
        # Of each row: `RowDraft.room`, `RowDraft.first` and the tokens.
        self._drafts = torch.zeros(num_rows, 2 + WINDOW, dtype=torch.int64, device=device)
        self._ahead = torch.arange(width, device=device)
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        # Numbers of steps. A slot is free again when its step has been read.
        self._launched = self._fetched = self._read = 0
        self._fetches: deque[tuple[int, Wait]] = deque()
        self.owner: Owner | None = None

    # -- on the host: rows -------------------------------------------------------------------------

    def acquire(self, owner: Owner) -> None:
        """Steps are ``owner``'s from now on."""
        if self.owner is not None and self.owner is not owner:
            self.owner.pause()
        self.owner = owner
        self._launched = self._fetched = self._read = 0
        self._fetches.clear()
        self.queue.put(self.step.zero_)

    @torch.inference_mode(False)
    def enter(self, sequences: list[Sequence], kind: SamplingKind) -> None:
        """Make row b the b-th sequence, all of whose tokens are known; the other rows are dead.

        All steps have been read. Later ones are of ``kind``.
        """
        assert self.num_unread == 0
        count, width = len(sequences), max(len(s.pages) for s in sequences)
        requests = [s.request for s in sequences]
        starts = [len(r.ids) - 1 for r in requests]
        fields = {
            Field.TOKEN: [s.answer[-1] for s in sequences],
            Field.POSITION: [s.computed for s in sequences],
            Field.ALIVE: [1] * count,
            Field.ORIGIN: [a - r.first_position for a, r in zip(starts, requests, strict=True)],
            Field.LAST: [a + r.max_new_tokens - 1 for a, r in zip(starts, requests, strict=True)],
            Field.YOUNGEST_STOP: [
                a + r.sampling.min_new_tokens for a, r in zip(starts, requests, strict=True)
            ],
            Field.PROMPT: [r.number for r in requests],
            Field.SAMPLE: [s.request.first_sample + s.sample for s in sequences],
            Field.STATES: [s.slot or 0 for s in sequences],
        }
        self._host_fields[Field.ALIVE] = 0
        self._host_fields[:, :count] = torch.tensor([fields[field] for field in Field])
        table = [s.pages + [self._trash_page] * (width - len(s.pages)) for s in sequences]
        self._host_table[:count, :width] = torch.tensor(table)
        self._upload(0)
        self.sampling.load(sequences, kind, self.queue.put)

    def set_page(self, row: int, index: int, page: int) -> None:
        """The next `launch` reads and writes this page of a sequence."""
        self._host_table[row, index] = page
        self._has_new_pages = True

    def load_drafts(self, rows: list[RowDraft]) -> None:
        """The drafts of the next `launch`, of the first rows."""
        packed = [[room, first, *ids] + [-1] * (WINDOW - len(ids)) for room, first, ids in rows]
        upload(torch.tensor(packed), self._drafts[: len(rows)], self.queue.put)

    def _upload(self, first: int) -> None:
        """Queue the copy of the host's rows, from element ``first`` on.

        NOTE: until all steps have been read, the host changes nothing here but pages that no step
        before the next copy reads. So it does not matter when this copy is done.
        """
        self.queue.put(
            partial(self._packed[first:].copy_, self._written[first:], non_blocking=True)
        )
        self._has_new_pages = False

    # -- on the host: steps ------------------------------------------------------------------------

    @property
    def num_unread(self) -> int:
        """Steps that have been launched and not read."""
        return self._launched - self._read

    def launch(self, replay: Callable[[], object]) -> None:
        """Queue a step, after the pages set since the last one."""
        assert self.num_unread < RING
        if self._has_new_pages:
            self._upload(self.fields.numel())
        self.queue.put(replay)
        self._launched += 1

    def fetch(self) -> None:
        """Queue the copy to the host of the steps launched so far, up to the end of the ring."""
        first = self._fetched % RING
        end = min(RING, first + self._launched - self._fetched)
        copy = self._host_ring[first:end].copy_
        self.queue.put(partial(copy, self.ring[first:end], non_blocking=True))
        self._fetched += end - first
        self._fetches.append((self._fetched, self.queue.mark()))

    def read(self) -> Tensor:
        """Tokens and log-probs of the oldest unread step, (2, Q, S) float64; waits for it.

        Overwritten by later steps. A token that was not drawn is `NO_DRAFT` or `REJECTED`.
        """
        if self._read == self._fetched:
            self.fetch()
        while self._fetches and self._fetches[0][0] <= self._read:
            self._fetches.popleft()
        self._fetches[0][1]()
        self._read += 1
        return self._host_ring[(self._read - 1) % RING]

    # -- on the device -----------------------------------------------------------------------------

    def rows(
        self, size: int, pages: int, kernels: StepKernels | None = None, width: int = 1
    ) -> StepRows:
        """Inputs of a step of ``size`` rows, of which it reads the first ``pages``, with ``width``
        positions each.
        """
        f = self.fields[:, :size]
        if kernels is not None and kernels.runs("state"):
            where = self._page_size, self._trash_page
            numbers, too_short = kernels.read_rows(self.fields, self.table, size, *where)
            table = self.table[:size, :pages]
            position, length, slot = numbers[:3].unbind()
            return StepRows(f[Field.TOKEN], position, length, slot, table, numbers[3:], too_short)
        alive = f[Field.ALIVE]
        table = self.table[:size, :pages].masked_fill(alive.unsqueeze(1) == 0, self._trash_page)
        tokens = f[Field.TOKEN].unsqueeze(1)
        positions = (f[Field.POSITION] * alive).unsqueeze(1)
        drafted = is_drafted = None
        if width > 1:
            later = f[Field.POSITION].unsqueeze(1) + self._ahead[1:width]
            drafted, is_drafted = self._drafts_at(later, f)
            tokens = torch.cat([tokens, drafted.clamp(min=0)], 1)
            positions = torch.cat([positions, later * is_drafted], 1)
        page = table.gather(1, positions // self._page_size)
        if is_drafted is not None:
            page[:, 1:].masked_fill_(~is_drafted, self._trash_page)
        slots = page * self._page_size + positions % self._page_size
        flat = tokens.flatten(), positions.flatten(), (positions + 1).flatten(), slots.flatten()
        return StepRows(*flat, table, *self._draws(f, width), drafted, is_drafted)

    def state_slots(self, size: int, trash: int) -> Tensor:
        """The slots (size,) int64 of the first rows' recurrent states; ``trash`` of dead rows."""
        f = self.fields[:, :size]
        return f[Field.STATES].masked_fill(f[Field.ALIVE] == 0, trash)

    def _drafts_at(self, positions: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
        """Drafted tokens at ``positions`` (B, Q - 1) of the rows ``f``, and where there are any."""
        given = self._drafts[: len(positions)]
        room, first, window = given[:, :1], given[:, 1:2], given[:, 2:]
        place = positions - first
        drafted = window.gather(1, place.clamp(0, WINDOW - 1))
        is_drafted = (drafted >= 0) & (place >= 0) & (place < WINDOW) & (positions < room)
        is_drafted &= positions <= f[Field.LAST].unsqueeze(1)
        return drafted, is_drafted & (f[Field.ALIVE].unsqueeze(1) > 0)

    def _draws(self, f: Tensor, width: int) -> tuple[tuple[Tensor, ...], Tensor]:
        """The key of each random number, and which rows may draw no stop token."""
        position = f[Field.POSITION]
        if width > 1:
            position = (position.unsqueeze(1) + self._ahead[:width]).view(-1)
            f = f.unsqueeze(2).expand(-1, -1, width).flatten(1)
        key = f[Field.PROMPT], f[Field.SAMPLE], position - f[Field.ORIGIN]
        return key, position < f[Field.YOUNGEST_STOP]

    def advance(
        self,
        tokens: Tensor,
        logprobs: Tensor,
        kind: SamplingKind,
        rows: StepRows,
        kernels: StepKernels | None = None,
    ) -> None:
        """Write the ring slot of this step, and move the rows to their next token: by as many of
        ``tokens`` (B Q,) as follow accepted drafts, and one.
        """
        if kernels is not None and kernels.runs("state"):
            memory = self.fields, self.ring, self.step
            kernels.advance_rows(tokens, logprobs, *memory, self.sampling.stops(kind))
            return
        size = len(rows.table)
        shown = tokens.view(size, -1)
        if rows.drafted is not None and rows.is_drafted is not None:
            first, later = shown[:, :1], shown[:, 1:]
            is_right = (shown[:, :-1] == rows.drafted) & rows.is_drafted
            if kind.num_stops:
                is_right &= ~self.sampling.is_stop(shown[:, :-1], kind)
            kept = is_right.long().cumprod(1)
            count = kept.sum(1)
            tokens = shown.gather(1, count.unsqueeze(1)).squeeze(1)
            instead = torch.where(rows.is_drafted, REJECTED, NO_DRAFT)
            shown = torch.cat([first, torch.where(kept > 0, later, instead)], 1)
            self.fields[Field.POSITION, :size] += count
        drawn = torch.stack([shown.double().T, logprobs.view(size, -1).double().T])
        ring = self.ring[:, :, : shown.shape[1], :size]
        ring.index_copy_(0, self.step % RING, drawn.unsqueeze(0))
        self.step += 1
        self._move(tokens, kind)

    def _move(self, tokens: Tensor, kind: SamplingKind) -> None:
        """Move the rows to ``tokens`` (B,), which were drawn at their positions."""
        f = self.fields[:, : len(tokens)]
        alive = f[Field.ALIVE]
        alive *= f[Field.POSITION] < f[Field.LAST]
        if kind.num_stops:
            alive *= ~self.sampling.is_stop(tokens, kind)
        f[Field.TOKEN].copy_(tokens)
        f[Field.POSITION] += alive

    @contextmanager
    def asleep(self) -> Iterator[None]:
        """Context in which steps count for nothing; all rows are dead until the next `enter`."""
        self.fields[Field.ALIVE].zero_()
        try:
            yield
        finally:
            self.step.fill_(self._launched)
