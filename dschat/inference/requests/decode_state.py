"""Holds what captured decode steps read and write, at fixed addresses.

A row is a sequence: its newest token, position, limits and block table. A step reads them, draws,
writes token and log-prob into a ring and advances the rows, without a number from the host. The
host writes rows in one copy before the next step, and reads the ring later.

Shapes: S rows, B of them in a step, W pages of the longest sequence, R slots of the ring.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dschat.inference.kernels.cuda import Field, operators
from dschat.inference.model.step_kernels import StepKernels
from dschat.inference.requests.sampler import SamplingKind, StepSampling
from dschat.inference.requests.sequence import Sequence

RING = 128  # steps that may run before the host reads the first one

Wait = Callable[[], None]


class Owner(Protocol):
    def pause(self) -> None:
        """Read all steps: another owner will overwrite the rows."""


class StepRows(NamedTuple):
    """Inputs of a step of B rows. Dead rows are at position 0 of the trash page."""

    tokens: Tensor  # (B,)
    positions: Tensor  # (B,)
    lengths: Tensor  # (B,) keys that each attends to
    slots: Tensor  # (B,) of its new key and value
    table: Tensor  # (B, W); by kernels, also what dead rows had
    key: Tensor | tuple[Tensor, ...]  # prompt, sample, place in the answer: (B,) each
    too_short: Tensor  # (B,) bool


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
    ``trash_page``, of ``page_size`` tokens.
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
        ring = RING, 2, num_rows
        self.ring = torch.zeros(ring, dtype=torch.float64, device=device)
        self._host_ring = torch.zeros(ring, dtype=torch.float64, pin_memory=pinned)
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
        """Tokens and log-probs of the oldest unread step, (2, S) float64; waits for it.

        Overwritten by later steps.
        """
        if self._read == self._fetched:
            self.fetch()
        while self._fetches and self._fetches[0][0] <= self._read:
            self._fetches.popleft()
        self._fetches[0][1]()
        self._read += 1
        return self._host_ring[(self._read - 1) % RING]

    # -- on the device -----------------------------------------------------------------------------

    def rows(self, size: int, pages: int, kernels: StepKernels | None = None) -> StepRows:
        """Inputs of a step of ``size`` rows, of which it reads the first ``pages``."""
        f = self.fields[:, :size]
        if kernels is not None and kernels.runs("state"):
            where = self._page_size, self._trash_page
            numbers, too_short = operators.read_rows(self.fields, self.table, size, *where)
            table = self.table[:size, :pages]
            position, length, slot = numbers[:3].unbind()
            return StepRows(f[Field.TOKEN], position, length, slot, table, numbers[3:], too_short)
        alive = f[Field.ALIVE]
        table = self.table[:size, :pages].masked_fill(alive.unsqueeze(1) == 0, self._trash_page)
        positions = f[Field.POSITION] * alive
        page = table.gather(1, (positions // self._page_size).unsqueeze(1)).squeeze(1)
        slots = page * self._page_size + positions % self._page_size
        key = f[Field.PROMPT], f[Field.SAMPLE], f[Field.POSITION] - f[Field.ORIGIN]
        too_short = f[Field.POSITION] < f[Field.YOUNGEST_STOP]
        return StepRows(f[Field.TOKEN], positions, positions + 1, slots, table, key, too_short)

    def state_slots(self, size: int, trash: int) -> Tensor:
        """The slots (size,) int64 of the first rows' recurrent states; ``trash`` of dead rows."""
        f = self.fields[:, :size]
        return f[Field.STATES].masked_fill(f[Field.ALIVE] == 0, trash)

    def advance(
        self,
        tokens: Tensor,
        logprobs: Tensor,
        kind: SamplingKind,
        kernels: StepKernels | None = None,
    ) -> None:
        """Write the ring slot of this step, and move the rows to ``tokens`` (B,), which were drawn
        at their positions.
        """
        if kernels is not None and kernels.runs("state"):
            memory = self.fields, self.ring, self.step
            operators.advance_rows(tokens, logprobs, *memory, self.sampling.stops(kind))
            return
        drawn = torch.stack([tokens.double(), logprobs.double()])
        ring = self.ring[:, :, : len(tokens)]
        ring.index_copy_(0, self.step % RING, drawn.unsqueeze(0))
        self.step += 1
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
