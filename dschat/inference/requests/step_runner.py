"""Runs one scheduled step on the device and returns the logits to sample from.

Packs the tokens of a `StepSchedule`, maps them to cache slots and runs the decoder: eagerly, or
short prompts by a captured step, one CUDA graph per bucket of rows and length. A prompt's step
launches a dozen kernels a layer. Of few tokens, the device is done with each before the host has
launched the next: on an H200, 8 x 256 tokens of OPT-1.3B took 13 ms of the host and 9 of the
device, 128 tokens of GPT-2 took 7 and 0.6.
"""

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dschat.config.errors import first_line
from dschat.inference.model.attention import Attention, Chunk, Decodes
from dschat.inference.model.decoder import Decoder
from dschat.inference.model.kv_cache import KVCache
from dschat.inference.model.module_decoder import AnyDecoder
from dschat.inference.model.states import Carried, StatePool, batches_alike, row_table
from dschat.inference.model.step_kernels import StepKernels
from dschat.inference.requests.cuda_graphs import Capture, DecodeGraphs, Step, batch_bucket
from dschat.inference.requests.sequence import Sequence, StepSchedule
from dschat.models.packing.states import StatefulRows

logger = logging.getLogger("dschat")

# Tokens times hidden size squared, above which the device takes longer than the host.
_MOST_WORK = 1e10


class PaddedShape(NamedTuple):
    rows: int
    length: int  # tokens of each row


def length_bucket(count: int) -> int:
    """The length that rows of at most ``count`` tokens are padded to: by up to an eighth, or 15."""
    step = 1 << max((count - 1).bit_length() - 4, 4)
    return -(-count // step) * step


class PromptGraphs:
    """Captured steps of ``decoder`` over ``cache``.

    A step's shape alone says whether it is captured, not how often it came: rows that are padded
    differently have log-probs that differ in the last bits. After a capture that failed, though, no
    other is tried.

    ``capture``: records a step. ``kernels``: run the operations that they apply to, of larger
    steps, too; None after a capture that failed.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        max_num_seqs: int,
        capture: Capture,
        kernels: StepKernels | None,
    ) -> None:
        self._decoder, self._cache, self._capture = decoder, cache, capture
        self._max_num_seqs = max_num_seqs
        self.kernels = kernels
        self._version = decoder.weights.version
        self._logits: dict[int, Tensor] = {}  # by rows: graphs of all lengths write to them
        self.steps: dict[PaddedShape, tuple[Tensor, Step]] = {}  # inputs, see `_run`, and replay
        self._failed = False

    def shape_for(self, schedule: StepSchedule) -> PaddedShape | None:
        """What a captured step pads ``schedule`` to; None: it is computed as it is."""
        whole = all(s.computed == 0 and n == len(s) and not s.forced for s, n in schedule.chunks)
        if schedule.decodes or not whole:
            return None
        counts = [count for _, count in schedule.chunks]
        shape = PaddedShape(
            batch_bucket(len(counts), self._max_num_seqs), length_bucket(max(counts))
        )
        padded = shape.rows * shape.length
        if padded * self._decoder.spec.hidden_size**2 > _MOST_WORK:
            return None
        if padded > sum(counts) * 5 // 4 + 256:
            return None
        if self._version != self._decoder.weights.version:  # of other addresses
            self.steps.clear()
            self._logits.clear()
            self._version = self._decoder.weights.version
        if shape not in self.steps and not self._failed:
            self._add(shape)
        return shape if shape in self.steps else None

    def logits(self, shape: PaddedShape, schedule: StepSchedule) -> Tensor:
        """Logits (R, V) of the prompts of ``schedule``. NOTE: the next call overwrites them."""
        inputs, replay = self.steps[shape]
        inputs.copy_(torch.from_numpy(self._packed(shape, schedule)))
        replay()
        return self._logits[shape.rows][: len(schedule.chunks)]

    def _packed(self, shape: PaddedShape, schedule: StepSchedule) -> "np.ndarray[Any, Any]":
        """The inputs of a step."""
        size = self._cache.page_size
        place = np.arange(shape.length)
        page, offset = np.divmod(place, size)
        packed = np.empty((3, *shape), dtype=np.int64)
        packed[:2], packed[2] = 0, self._cache.trash_page * size
        ready = np.arange(0, shape.rows * shape.length, shape.length)
        for row, (s, count) in enumerate(schedule.chunks):
            packed[0, row, :count] = s.tokens(0, count)
            packed[1, row, :count] = place[:count]
            packed[2, row, :count] = np.array(s.pages)[page[:count]] * size + offset[:count]
            ready[row] += count - 1
        return np.concatenate([packed.ravel(), ready])

    def _add(self, shape: PaddedShape) -> None:
        """Capture the step of a shape."""
        size, device, cache = shape.rows * shape.length, self._decoder.weights.device, self._cache
        with torch.inference_mode(False):  # they are written outside it, too
            inputs = torch.zeros(3 * size + shape.rows, dtype=torch.int64, device=device)
            inputs[2 * size : 3 * size] = cache.trash_page * cache.page_size
        problem = ""
        try:
            self.steps[shape] = inputs, self._capture(partial(self._run, shape, inputs))
        except Exception as error:  # torch's, or of Triton, which have no type in common
            problem = first_line(error)
        # NOTE: where one rank cannot, none does: a capture runs the step once, on all ranks.
        if problem := max(self._decoder.weights.group.gather_objects(problem)):
            logger.info("prompts of %d x %d tokens are not captured: %s", *shape, problem)
            self._failed, self.kernels = True, None
            self.steps.pop(shape, None)

    @torch.inference_mode()
    def _run(self, shape: PaddedShape, inputs: Tensor) -> None:
        """``inputs``: ids, positions and cache slots of rows that are all as long, of which the
        tokens after their own are padding, and the token that each row is read at.
        """
        size = shape.rows * shape.length
        tokens, positions, slots, ready = inputs.split([size, size, size, shape.rows])
        chunks = [Chunk(i * shape.length, shape.length, 0, []) for i in range(shape.rows)]
        decoder = self._decoder
        attention = Attention(decoder.spec, self._cache, slots, None, chunks, decoder.slopes)
        logits = decoder.step(tokens, positions, attention, ready, self.kernels)
        if shape.rows not in self._logits:  # in the warm-up: no graph's own memory
            with torch.inference_mode(False):
                self._logits[shape.rows] = torch.empty_like(logits)
        self._logits[shape.rows].copy_(logits)


class StepRunner:
    """Runs steps of ``decoder`` over ``cache``.

    ``capture``: records steps, which use ``kernels``; None: they run eagerly.
    """

    def __init__(
        self,
        decoder: AnyDecoder,
        cache: KVCache,
        max_num_seqs: int,
        max_seq_len: int,
        capture: Capture | None,
        kernels: StepKernels | None = None,
    ) -> None:
        self._decoder, self._cache = decoder, cache
        self.device = decoder.weights.device
        self._max_num_seqs, self._max_seq_len = max_num_seqs, max_seq_len
        self._capture, self._kernels = capture, kernels
        self._graphs: DecodeGraphs | None = None
        self.prompts: PromptGraphs | None = None
        if capture is not None and isinstance(decoder, Decoder) and not decoder.spec.states:
            of_prompts = None if kernels is None else kernels.without("attention")
            self.prompts = PromptGraphs(decoder, cache, max_num_seqs, capture, of_prompts)

    def logits(self, schedule: StepSchedule) -> Tensor:
        """Logits (R, V) of the sequences in ``schedule.ready``: a row for the last token, then one
        for each of `Sequence.forced`.
        """
        if self.prompts is not None and (shape := self.prompts.shape_for(schedule)) is not None:
            return self.prompts.logits(shape, schedule)
        decoder = self._decoder
        if not decoder.spec.states or decoder.reads_rows:
            return self._logits(schedule)
        return torch.cat([self._logits(part) for part in _parts(schedule)])

    def _logits(self, schedule: StepSchedule) -> Tensor:
        step = pack(schedule, self._cache.page_size)
        packed = torch.tensor([step.tokens, step.positions, step.slots])
        tokens, positions, slots = packed.to(self.device).unbind()
        decodes = step.spans[: step.num_decoding]
        attention = Attention(
            self._decoder.spec,
            self._cache,
            slots,
            self._rows(decodes, step.positions, positions) if decodes else None,
            step.chunks,
            self._decoder.slopes,
        )
        # Without chunks every row is read.
        ready = torch.tensor(step.ready, dtype=torch.int64).to(self.device) if step.chunks else None
        inputs = tokens, positions, attention, ready
        if (pool := self._cache.states) is not None:
            with ExitStack() as scope:
                carried = self._carried(step, pool, scope)
                return self._decoder.step(*inputs, carried=carried)
        kernels = None if self.prompts is None else self.prompts.kernels
        return self._decoder.step(*inputs, kernels=kernels)

    def _carried(self, step: "Packed", pool: StatePool, scope: ExitStack) -> Carried | StatefulRows:
        """The states that ``step`` reads and changes; until the end of ``scope``."""
        counts, are_new = (
            [count for _, count in step.spans],
            [s.computed == 0 for s, _ in step.spans],
        )
        slots = [s.slot for s, _ in step.spans if s.slot is not None]
        batches = batches_alike(counts, are_new)
        caches = [
            scope.enter_context(pool.carried([slots[i] for i in batch], are_new[batch[0]]))
            for batch in batches
        ]
        # Tokens that a layer cannot read behind states in one call are read one after another.
        singly = tuple(
            not (are_new[first] or counts[first] == 1 or self._decoder.continues_states)
            for first, *_ in batches
        )
        is_even = len(set(counts)) == len(set(step.num_ready)) == len(batches) == 1
        if is_even and not singly[0]:
            return Carried(caches[0], len(step.spans), step.num_ready[0])
        table, masks = row_table(counts, batches, self.device)
        return StatefulRows(table, masks, tuple(caches), pool.empty(), singly)

    def graphs(self, num_tokens: int) -> DecodeGraphs:
        """Decode steps for `CapturedCore`; captured again if weights were reallocated."""
        assert self._capture is not None
        if self._graphs is None or not self._graphs.is_current:
            if self._graphs is not None:
                logger.info("weights were reallocated: capturing decode graphs again")
            sizes = self._max_num_seqs, self._max_seq_len, num_tokens
            self._graphs = DecodeGraphs(
                self._decoder, self._cache, *sizes, self._capture, kernels=self._kernels
            )
        return self._graphs

    def _rows(
        self, spans: list[tuple[Sequence, int]], positions: list[int], positions_T: Tensor
    ) -> Decodes:
        """The first rows of the step, one token each. ``spans``: their sequences, and how many
        tokens of each.
        """
        pages, counts = [s.pages for s, _ in spans], [count for _, count in spans]
        count = sum(counts)
        longest, size = max(positions[:count]) + 1, self._cache.page_size
        ragged = min(positions[:count]) + 1 < longest
        table = None
        # Where sequence b is in page b, a batch is a slice of the cache.
        is_slice = all(p[0] == b for b, p in enumerate(pages))
        if size < longest or count > len(spans) or not is_slice:
            width = -(-longest // size)
            rows = [(p + [p[0]] * width)[:width] for p in pages]
            table = torch.tensor(rows, device=self.device)
            if count > len(spans):
                # On a CPU repeat_interleave starts all threads: 0.1 ms.
                sequence_of_row = [i for i, n in enumerate(counts) for _ in range(n)]
                table = table.index_select(0, torch.tensor(sequence_of_row, device=self.device))
            if size < longest:
                ragged = ragged or width * size > longest
        return Decodes(count, positions_T[:count] + 1, longest, table, ragged)


class Packed(NamedTuple):
    """The tokens of a step end to end: of the sequences that decode, then of chunks of prompts."""

    tokens: list[int]
    positions: list[int]
    slots: list[int]  # of the cache, for the tokens' keys and values
    ready: list[int]  # places among the tokens at which logits are read
    chunks: list[Chunk]
    spans: list[tuple[Sequence, int]]  # with how many tokens each has in the step
    num_decoding: int  # of the spans; the others are the chunks
    num_ready: list[int]  # of each span


def pack(schedule: StepSchedule, page_size: int) -> Packed:
    """The step of ``schedule``. A sequence's forced tokens stand behind those it has: all are
    computed at once, and each is read, for its log-prob.
    """
    decodes = [(s, 1 + len(s.forced)) for s in schedule.decodes]
    chunks = [(s, count + len(s.forced)) for s, count in schedule.chunks]
    step = Packed([], [], [], [], [], decodes + chunks, len(decodes), [])
    for i, (s, count) in enumerate(step.spans):
        first, end, row = s.computed, s.computed + count, len(step.tokens)
        step.tokens.extend([*s.tokens(first, end), *s.forced])
        step.positions.extend(range(first, end))
        places = ((s.pages[p // page_size], p % page_size) for p in range(first, end))
        step.slots.extend(page * page_size + offset for page, offset in places)
        if i >= len(decodes):
            step.chunks.append(Chunk(row, count, first, s.pages))
        num_ready = max(0, end + 1 - len(s)) if end >= len(s) else 0
        step.num_ready.append(num_ready)
        step.ready.extend(range(row + count - num_ready, row + count))
    return step


def _parts(schedule: StepSchedule) -> Iterator[StepSchedule]:
    """Steps whose sequences compute equally many tokens, and are all new or all continued."""
    # NOTE: a prompt of one token may be a decode.
    for _, decodes in groupby(schedule.decodes, lambda s: (len(s.forced), s.computed == 0)):
        yield StepSchedule(list(decodes), [])

    def kind(chunk: tuple[Sequence, int]) -> tuple[int, int, bool, bool]:
        s, count = chunk
        return count, len(s.forced), s.computed == 0, s.computed + count == len(s)

    for _, chunks in groupby(schedule.chunks, kind):
        yield StepSchedule([], list(chunks))
