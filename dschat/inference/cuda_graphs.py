"""Captures decode steps as CUDA graphs and replays them, one per bucket of batch size and length.

Inputs are copied into static tensors. A batch is padded to its bucket with rows that write to the
cache's trash page, and attention reads the bucket's length instead of `max_seq_len`. Weights are
refreshed in place, so a graph outlives optimizer steps; it is captured again only when weights or
cache are reallocated.
"""

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from dschat.config.errors import first_line
from dschat.inference.model.attention import Attention, Decodes
from dschat.inference.model.decoder import Decoder
from dschat.inference.model.kv_cache import KVCache

logger = logging.getLogger("dschat")

Step = Callable[[], Tensor]
Capture = Callable[[Step], Step]  # -> replay: runs the step on the current content of its inputs

_BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
_SHORTEST = 128  # tokens: length buckets are this, and multiples that grow by about a third


def batch_bucket(count: int, largest: int) -> int:
    """The batch size that ``count`` sequences are padded to; at most ``largest``."""
    return min(next((b for b in _BATCHES if b >= count), count), max(largest, count))


def length_bucket(length: int, largest: int) -> int:
    """Number of keys that attention reads for lengths up to ``length``; at most ``largest``."""
    bucket = _SHORTEST
    while bucket < length:
        bucket += max(_SHORTEST, bucket // 3 // _SHORTEST * _SHORTEST)
    return min(bucket, max(largest, length))


def capture_cuda(step: Step) -> Step:
    """Record ``step`` as a CUDA graph, after a warm-up run."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


class DecodeGraphs:
    """Captured decode steps of ``decoder`` over ``cache``.

    Args:
        max_num_seqs, max_seq_len: the largest batch and length.
        capture: records a step; the default needs CUDA.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        max_num_seqs: int,
        max_seq_len: int,
        capture: Capture = capture_cuda,
    ) -> None:
        self._decoder, self._cache, self._capture = decoder, cache, capture
        self._max_num_seqs = min(max_num_seqs, cache.num_pages)
        self._max_seq_len = max_seq_len
        self._graphs: dict[tuple[int, int, bool], Step] = {}
        self._version = decoder.weights.version
        device = decoder.weights.device
        columns = cache.pages_for(length_bucket(max_seq_len, max_seq_len))
        # NOTE: tensors created in inference mode could not be written outside it.
        with torch.inference_mode(False):
            self._packed = torch.zeros(3, max_num_seqs, dtype=torch.int64, device=device)
            self._table = torch.full((max_num_seqs, columns), cache.trash_page, device=device)
        self.failed = False
        self.num_captured = 0

    def fits(self, decoder: Decoder, cache: KVCache) -> bool:
        """Whether the captured addresses still belong to ``decoder`` and ``cache``."""
        same = decoder is self._decoder and cache is self._cache
        return same and self._version == decoder.weights.version

    @torch.inference_mode(False)
    @torch.no_grad()
    def logits(
        self, packed: Tensor, longest: int, pages: list[list[int]], in_order: bool
    ) -> Tensor | None:
        """Logits (B, V) of one decode step; None if the capture failed and the caller must decode
        eagerly.

        ``packed`` (3, B) int64 on the CPU: tokens, positions, slot_mapping. ``longest``: keys of
        the longest sequence. ``in_order``: sequence b is in page b, whole.
        """
        count = packed.shape[1]
        size = batch_bucket(count, self._max_num_seqs)
        length = length_bucket(longest, self._max_seq_len)
        self._fill(packed, size)
        if not in_order:
            self._fill_table(pages, size, self._cache.pages_for(length))
        key = (size, length, in_order)
        if key not in self._graphs and not self._record(key):
            return None
        return self._graphs[key]()[:count]

    def _fill(self, packed: Tensor, size: int) -> None:
        count = packed.shape[1]
        if count < size:
            padding = torch.zeros(3, size - count, dtype=torch.int64)
            padding[2] = self._cache.trash_page * self._cache.page_size
            packed = torch.cat([packed, padding], dim=1)
        self._packed[:, :size].copy_(packed)

    def _fill_table(self, pages: list[list[int]], size: int, columns: int) -> None:
        trash = [self._cache.trash_page] * columns
        rows = [(p + trash)[:columns] for p in pages] + [trash] * (size - len(pages))
        self._table[:size, :columns].copy_(torch.tensor(rows))

    def _record(self, key: tuple[int, int, bool]) -> bool:
        size, length, in_order = key
        columns = self._cache.pages_for(length)
        tokens, positions, slot_mapping = (row[:size] for row in self._packed)
        table = None if in_order else self._table[:size, :columns]

        def step() -> Tensor:
            decodes = Decodes(size, positions + 1, length, table, ragged=True)
            decoder, cache = self._decoder, self._cache
            attention = Attention(decoder.spec, cache, slot_mapping, decodes, [], decoder.slopes)
            return decoder.logits(decoder.hidden(tokens, positions, attention))

        try:
            self._graphs[key] = self._capture(step)
        except RuntimeError as error:
            self.failed = True
            logger.warning("CUDA graph capture failed, decoding eagerly: %s", first_line(error))
            return False
        self.num_captured += 1
        return True
