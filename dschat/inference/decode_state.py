"""Holds what captured decode steps read and write, at fixed addresses.

A row is a sequence: its newest token, position, limits and block table. A step reads them, draws,
writes token and log-prob into a ring and advances the rows, without a number from the host. The
host writes rows in one copy before the next step, and reads the ring later.

Shapes: S rows, B of them in a step, W pages of the longest sequence, R slots of the ring.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from dschat.inference.kernels.cuda.dispatch import StepKernels
from dschat.inference.protocol import SamplingParams
from dschat.inference.sampler import SamplingKind, StepSampling
from dschat.inference.sequence import Sequence

RING = 128  # steps that may run before the host reads the first one

Wait = Callable[[], None]


class Owner(Protocol):
    def pause(self) -> None:
        """Read all steps: another owner will overwrite the rows."""


class _Field(IntEnum):
    TOKEN = 0
    POSITION = 1  # of TOKEN; its key and value are written by the next step
    ALIVE = 2
    START = 3  # position of the prompt's last token
    LAST = 4  # position that draws the last token
    YOUNGEST_STOP = 5  # first position that may draw a stop token
    PROMPT = 6
    SAMPLE = 7


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
        self.num_rows, self._page_size, self._trash_page = num_rows, page_size, trash_page
        self._queue = queue or DeviceQueue(device)
        pinned = device.type == "cuda"
        size = num_rows * (len(_Field) + num_pages)
        shapes = (len(_Field), num_rows), (num_rows, num_pages)

        def split(packed: Tensor) -> tuple[Tensor, Tensor]:
            fields, table = packed.split([len(_Field) * num_rows, num_rows * num_pages])
            return fields.view(shapes[0]), table.view(shapes[1])

        self._packed = torch.zeros(size, dtype=torch.int64, device=device)
        self._fields, self._table = split(self._packed)  # (8, S) and (S, W)
        self._written = torch.zeros(size, dtype=torch.int64, pin_memory=pinned)
        self._host_fields, self._host_table = split(self._written)
        self._has_new_pages = False
        self._sampling = StepSampling(device)
        self._ring = torch.zeros(RING, 2, num_rows, dtype=torch.float64, device=device)
        self._host_ring = torch.zeros(RING, 2, num_rows, dtype=torch.float64, pin_memory=pinned)
        self._step = torch.zeros(1, dtype=torch.int64, device=device)
        # Numbers of steps. A slot is free again when its step has been read.
        self._launched = self._fetched = self._read = 0
        self._fetches: deque[tuple[int, Wait]] = deque()
        self.owner: Owner | None = None

    # -- on the host: rows -------------------------------------------------------------------------

    def acquire(self, owner: Owner, sampling: SamplingParams, stops: list[int]) -> SamplingKind:
        """Steps are ``owner``'s from now on. They draw with ``sampling`` and end at ``stops``."""
        if self.owner is not None and self.owner is not owner:
            self.owner.pause()  # NOTE: also one that was closed: its steps may be under way
        self.owner = owner
        self._launched = self._fetched = self._read = 0
        self._fetches.clear()
        self._queue.put(self._step.zero_)
        return self._sampling.load(sampling, stops, self._queue.put)

    @torch.inference_mode(False)
    def enter(self, sequences: list[Sequence], min_new_tokens: int) -> None:
        """Make row b the b-th sequence, all of whose tokens are known; the other rows are dead.

        All steps have been read.
        """
        assert self.num_unread == 0
        count, width = len(sequences), max(len(s.pages) for s in sequences)
        starts = [len(s.prompt.ids) - 1 for s in sequences]
        lengths = [s.prompt.max_new_tokens for s in sequences]
        fields = {
            _Field.TOKEN: [s.answer[-1] for s in sequences],
            _Field.POSITION: [s.computed for s in sequences],
            _Field.ALIVE: [1] * count,
            _Field.START: starts,
            _Field.LAST: [a + b - 1 for a, b in zip(starts, lengths, strict=True)],
            _Field.YOUNGEST_STOP: [start + min_new_tokens for start in starts],
            _Field.PROMPT: [s.prompt.number for s in sequences],
            _Field.SAMPLE: [s.sample for s in sequences],
        }
        self._host_fields[_Field.ALIVE] = 0
        self._host_fields[:, :count] = torch.tensor([fields[field] for field in _Field])
        table = [s.pages + [self._trash_page] * (width - len(s.pages)) for s in sequences]
        self._host_table[:count, :width] = torch.tensor(table)
        self._upload(0)

    def set_page(self, row: int, index: int, page: int) -> None:
        """The next `launch` reads and writes this page of a sequence."""
        self._host_table[row, index] = page
        self._has_new_pages = True

    def _upload(self, first: int) -> None:
        """Queue the copy of the host's rows, from element ``first`` on.

        NOTE: until all steps have been read, the host changes nothing here but pages that no step
        before the next copy reads. So it does not matter when this copy is done.
        """
        self._queue.put(
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
            self._upload(self._fields.numel())
        self._queue.put(replay)
        self._launched += 1

    def fetch(self) -> None:
        """Queue the copy to the host of the steps launched so far, up to the end of the ring."""
        first = self._fetched % RING
        end = min(RING, first + self._launched - self._fetched)
        copy = self._host_ring[first:end].copy_
        self._queue.put(partial(copy, self._ring[first:end], non_blocking=True))
        self._fetched += end - first
        self._fetches.append((self._fetched, self._queue.mark()))

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

    def inputs(self, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens (B,), positions (B,) and block table (B, W) int64 of a step of ``size`` rows.

        Dead rows are at position 0 of the trash page.
        """
        fields = self._fields[:, :size]
        alive = fields[_Field.ALIVE]
        table = self._table[:size].masked_fill(alive.unsqueeze(1) == 0, self._trash_page)
        return fields[_Field.TOKEN], fields[_Field.POSITION] * alive, table

    def slots(self, positions: Tensor, table: Tensor) -> Tensor:
        """Cache slot of each row's new key and value, (B,) int64."""
        pages = table.gather(1, (positions // self._page_size).unsqueeze(1)).squeeze(1)
        return pages * self._page_size + positions % self._page_size

    def draw(
        self,
        logits: Tensor,
        kind: SamplingKind,
        num_tokens: int,
        kernels: StepKernels | None = None,
    ) -> tuple[Tensor, Tensor]:
        """A token (B,) int64 and its log-prob (B,) fp32 for each row of ``logits`` (B, V)."""
        f = self._fields[:, : len(logits)]
        too_short = f[_Field.POSITION] < f[_Field.YOUNGEST_STOP]
        key = f[_Field.PROMPT], f[_Field.SAMPLE], f[_Field.POSITION] - f[_Field.START]
        return self._sampling.draw(logits, kind, key, too_short, num_tokens, kernels)

    def advance(self, tokens: Tensor, logprobs: Tensor, kind: SamplingKind) -> None:
        """Write the ring slot of this step, and move the rows to their next token."""
        size = len(tokens)
        drawn = torch.stack([tokens.double(), logprobs.double()])
        self._ring[:, :, :size].index_copy_(0, self._step % RING, drawn.unsqueeze(0))
        self._step += 1
        f = self._fields[:, :size]
        alive = f[_Field.ALIVE]
        alive *= f[_Field.POSITION] < f[_Field.LAST]
        if kind.num_stops:
            alive *= ~self._sampling.is_stop(tokens, kind)
        f[_Field.TOKEN].copy_(tokens)
        f[_Field.POSITION] += alive

    @contextmanager
    def asleep(self) -> Iterator[None]:
        """Context in which steps count for nothing; all rows are dead until the next `enter`."""
        self._fields[_Field.ALIVE].zero_()
        try:
            yield
        finally:
            self._step.fill_(self._launched)
