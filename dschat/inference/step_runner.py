"""Runs one scheduled step on the device and returns the logits to sample from.

Packs the tokens of a `StepSchedule`, maps them to cache slots and runs the decoder: eagerly, or
short prompts by a captured step.
"""

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import groupby

import torch
from torch import Tensor

from dschat.inference.cuda_graphs import Capture, DecodeGraphs
from dschat.inference.kernels.cuda.dispatch import StepKernels
from dschat.inference.model.attention import Attention, Chunk, Decodes
from dschat.inference.model.decoder import Decoder
from dschat.inference.model.kv_cache import KVCache
from dschat.inference.model.module_decoder import AnyDecoder, Carried, ModuleDecoder
from dschat.inference.model.states import batches_alike, row_table
from dschat.inference.prompt_graphs import PromptGraphs
from dschat.inference.sequence import Sequence, StepSchedule
from dschat.models.packing.states import StatefulRows

logger = logging.getLogger("dschat")


class StepRunner:
    """Runs steps of ``decoder`` over ``cache``.

    ``capture``: records steps, which use ``kernels``; None: they run eagerly.
    ``drafts``: captured ones may compute several positions of a sequence.
    """

    def __init__(
        self,
        decoder: AnyDecoder,
        cache: KVCache,
        max_num_seqs: int,
        max_seq_len: int,
        capture: Capture | None,
        kernels: StepKernels | None = None,
        drafts: bool = False,
    ) -> None:
        self._decoder, self._cache = decoder, cache
        self.device = decoder.weights.device
        self._max_num_seqs, self._max_seq_len = max_num_seqs, max_seq_len
        self._capture, self._kernels, self._drafts = capture, kernels, drafts
        self._graphs: DecodeGraphs | None = None
        self.prompts: PromptGraphs | None = None
        if capture is not None and isinstance(decoder, Decoder):
            self.prompts = PromptGraphs(decoder, cache, max_num_seqs, capture, kernels)

    def logits(self, schedule: StepSchedule) -> Tensor:
        """Logits (R, V) of the sequences in ``schedule.ready``: a row for the last token, then one
        for each token of the draft.
        """
        if self.prompts is not None and (shape := self.prompts.shape_for(schedule)) is not None:
            return self.prompts.logits(shape, schedule)
        decoder = self._decoder
        if isinstance(decoder, Decoder) or not decoder.spec.states or decoder.reads_rows:
            return self._logits(schedule)
        return torch.cat([self._logits(part) for part in _parts(schedule)])

    def _logits(self, schedule: StepSchedule) -> Tensor:
        size = self._cache.page_size
        tokens: list[int] = []
        positions: list[int] = []
        slot_mapping: list[int] = []
        ready: list[int] = []
        num_ready: list[int] = []  # of each span
        chunks: list[Chunk] = []
        # NOTE: keys and values of a draft that is not accepted are overwritten later, and no row
        # attends to them until then.
        decodes = [(s, 1 + len(s.draft)) for s in schedule.decodes]
        spans = decodes + [(s, count + len(s.draft)) for s, count in schedule.chunks]
        for i, (s, count) in enumerate(spans):
            first, end = s.computed, s.computed + count
            row = len(tokens)
            tokens += s.tokens(first, end)
            tokens += s.draft
            positions += range(first, end)
            slot_mapping += [s.pages[p // size] * size + p % size for p in range(first, end)]
            if i >= len(decodes):
                chunks.append(Chunk(row, count, first, s.pages))
            num_ready.append(max(0, count + first + 1 - len(s)) if end >= len(s) else 0)
            ready += range(row + count - num_ready[-1], row + count)
        packed = torch.tensor([tokens, positions, slot_mapping])
        tokens_T, positions_T, slots_T = packed.to(self.device).unbind()
        attention = Attention(
            self._decoder.spec,
            self._cache,
            slots_T,
            self._rows(decodes, positions, positions_T) if decodes else None,
            chunks,
            self._decoder.slopes,
        )
        ready_R = torch.tensor(ready, dtype=torch.int64).to(self.device) if chunks else None
        inputs = tokens_T, positions_T, attention, ready_R
        if (pool := self._cache.states) is None:
            return self._decoder.step(*inputs)
        assert isinstance(self._decoder, ModuleDecoder)
        counts, are_new = [count for _, count in spans], [s.computed == 0 for s, _ in spans]
        slots = [s.slot for s, _ in spans if s.slot is not None]
        batches = batches_alike(counts, are_new)
        with ExitStack() as scope:
            caches = [
                scope.enter_context(pool.carried([slots[i] for i in batch], are_new[batch[0]]))
                for batch in batches
            ]
            singly = tuple(
                not (are_new[first] or counts[first] == 1 or self._decoder.continues_states)
                for first, *_ in batches
            )
            carried: Carried | StatefulRows
            is_even = len(set(counts)) == len(set(num_ready)) == len(batches) == 1
            if is_even and not singly[0]:
                carried = Carried(caches[0], len(spans), num_ready[0])
            else:
                table, masks = row_table(counts, batches, self.device)
                carried = StatefulRows(table, masks, tuple(caches), pool.empty(), singly)
            return self._decoder.step(*inputs, carried=carried)

    def graphs(self, num_tokens: int) -> DecodeGraphs:
        """Decode steps for `CapturedCore`; captured again if weights were reallocated."""
        assert self._capture is not None
        if self._graphs is None or not self._graphs.is_current:
            if self._graphs is not None:
                logger.info("weights were reallocated: capturing decode graphs again")
            sizes = self._max_num_seqs, self._max_seq_len, num_tokens
            self._graphs = DecodeGraphs(
                *(self._decoder, self._cache, *sizes, self._capture),
                kernels=self._kernels,
                drafts=self._drafts,
            )
        return self._graphs

    def _rows(
        self, spans: list[tuple[Sequence, int]], positions: list[int], positions_T: Tensor
    ) -> Decodes:
        """The first rows of the step, each one token: those of ``spans``, which are sequences and
        how many tokens of each.
        """
        pages, counts = [s.pages for s, _ in spans], [count for _, count in spans]
        count = sum(counts)
        longest, size = max(positions[:count]) + 1, self._cache.page_size
        ragged = min(positions[:count]) + 1 < longest
        table = None
        if size < longest or count > len(spans) or not _in_order(pages):
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


def _parts(schedule: StepSchedule) -> Iterator[StepSchedule]:
    """Steps whose sequences compute equally many tokens, and are all new or all continued."""
    # NOTE: a prompt of one token may be a decode.
    for _, decodes in groupby(schedule.decodes, lambda s: (len(s.draft), s.computed == 0)):
        yield StepSchedule(list(decodes), [])

    def kind(chunk: tuple[Sequence, int]) -> tuple[int, int, bool, bool]:
        s, count = chunk
        return count, len(s.draft), s.computed == 0, s.computed + count == len(s)

    for _, chunks in groupby(schedule.chunks, kind):
        yield StepSchedule([], list(chunks))


def _in_order(pages: list[list[int]]) -> bool:
    """Whether sequence b is in page b, so that a batch is a slice of the cache."""
    return all(p[0] == b for b, p in enumerate(pages))
