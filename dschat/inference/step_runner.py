"""Runs one scheduled step on the device and returns the logits to sample from.

Packs the tokens of a `StepSchedule`, maps them to cache slots and runs the decoder: eagerly, or as
one fused call on a CPU if all sequences decode.
"""

import logging

import torch
from torch import Tensor

from dschat.inference.cuda_graphs import Capture, DecodeGraphs
from dschat.inference.kernels.cuda.dispatch import StepKernels
from dschat.inference.kernels.fused_decode import FusedDecode
from dschat.inference.model.attention import Attention, Chunk, Decodes
from dschat.inference.model.decoder import Decoder
from dschat.inference.model.kv_cache import KVCache
from dschat.inference.sequence import StepSchedule

logger = logging.getLogger("dschat")


class StepRunner:
    """Runs steps of ``decoder`` over ``cache``.

    ``capture``: records decode steps, which use ``kernels``; None: they run eagerly.
    ``guesses``: captured ones may compute several positions of a sequence.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        max_num_seqs: int,
        max_seq_len: int,
        capture: Capture | None,
        kernels: StepKernels | None = None,
        guesses: bool = False,
    ) -> None:
        self._decoder, self._cache = decoder, cache
        self.device = decoder.weights.device
        self._max_num_seqs, self._max_seq_len = max_num_seqs, max_seq_len
        self._capture, self._kernels, self._guesses = capture, kernels, guesses
        self._graphs: DecodeGraphs | None = None
        self._fused: FusedDecode | None = None

    def logits(self, schedule: StepSchedule) -> Tensor:
        """Logits (R, V) of the sequences in ``schedule.ready``: a row for the last token, then one
        for each token of the draft.
        """
        cache, size = self._cache, self._cache.page_size
        tokens, positions, slot_mapping, last_rows = [], [], [], []
        pages: list[list[int]] = []  # of each decoding row
        chunks: list[Chunk] = []
        for s in schedule.decodes:
            last = s.answer[-1] if s.answer else s.prompt.ids[-1]
            # NOTE: keys and values of a draft that is not accepted are overwritten later, and no
            # row attends to them until then.
            for p, token in enumerate((last, *s.draft), s.computed):
                tokens.append(token)
                positions.append(p)
                slot_mapping.append(s.pages[p // size] * size + p % size)
                pages.append(s.pages)
        for s, count in schedule.chunks:
            first, end = s.computed, s.computed + count
            chunks.append(Chunk(len(tokens), count, first, s.pages))
            tokens += s.tokens(first, end)
            positions += range(first, end)
            slot_mapping += [s.pages[p // size] * size + p % size for p in range(first, end)]
            if end == len(s):
                last_rows.append(len(tokens) - 1)
        packed = torch.tensor([tokens, positions, slot_mapping])
        tokens_T, positions_T, slots_T = packed.to(self.device).unbind()
        decodes = self._decodes(pages, positions, positions_T) if pages else None
        if decodes is not None and not chunks and self._decoder.weights.has_panels:
            logits = self._fused_step().logits(tokens_T, positions_T, slots_T, decodes)
            if logits is not None:
                return logits
        attention = Attention(
            self._decoder.spec,
            cache,
            slots_T,
            decodes,
            chunks,
            self._decoder.slopes,
        )
        hidden = self._decoder.hidden(tokens_T, positions_T, attention)
        if chunks:
            rows = torch.tensor([*range(len(pages)), *last_rows], dtype=torch.int64)
            hidden = hidden.index_select(0, rows.to(self.device))
        return self._decoder.logits(hidden)

    def _fused_step(self) -> FusedDecode:
        if self._fused is None or not self._fused.fits(self._decoder, self._cache):
            self._fused = FusedDecode(self._decoder, self._cache, self._max_num_seqs)
        return self._fused

    def graphs(self, num_tokens: int) -> DecodeGraphs:
        """Decode steps for `DeviceLoop`; captured again if weights or cache were reallocated."""
        assert self._capture is not None
        if self._graphs is None or not self.fits(self._graphs):
            if self._graphs is not None:
                logger.info("weights or cache were reallocated: capturing decode graphs again")
            sizes = self._max_num_seqs, self._max_seq_len, num_tokens
            self._graphs = DecodeGraphs(
                *(self._decoder, self._cache, *sizes, self._capture),
                kernels=self._kernels,
                guesses=self._guesses,
            )
        return self._graphs

    def fits(self, graphs: DecodeGraphs) -> bool:
        """Whether ``graphs`` read the present weights and cache."""
        return graphs.fits(self._decoder, self._cache)

    def _decodes(
        self, pages: list[list[int]], positions: list[int], positions_T: Tensor
    ) -> Decodes:
        """``pages``: of each decoding row. ``positions``: of these and other rows."""
        count = len(pages)
        longest, size = max(positions[:count]) + 1, self._cache.page_size
        ragged = min(positions[:count]) + 1 < longest
        table = None
        if size < longest or not _in_order(pages):
            width = -(-longest // size)
            rows = [(p + [p[0]] * width)[:width] for p in pages]
            table = torch.tensor(rows, device=self.device)
            if size < longest:
                ragged = ragged or width * size > longest
        return Decodes(count, positions_T[:count] + 1, longest, table, ragged)


def _in_order(pages: list[list[int]]) -> bool:
    """Whether sequence b is in page b, so that a batch is a slice of the cache."""
    return all(p[0] == b for b, p in enumerate(pages))
