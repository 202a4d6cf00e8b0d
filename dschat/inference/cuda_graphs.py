"""Captures decode steps as CUDA graphs and replays them, one per bucket of batch size and length.

Inputs are copied into static tensors. A batch is padded to its bucket with rows that write to the
cache's trash page, and attention reads the bucket's length instead of `max_seq_len`. Weights are
refreshed in place, so a graph outlives optimizer steps; it is captured again only when weights or
cache are reallocated.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from dschat.config.errors import UserError, first_line
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


class CudaCapture:
    """Records steps as CUDA graphs, all of them on one stream and in one memory pool.

    The result of a replay is valid until any of the graphs is replayed again. Unlike
    `torch.cuda.graph`, this neither waits for the device nor empties torch's memory cache, which
    training would have to fill again. ``required``: a failure is a `UserError`, which nothing
    catches; else a RuntimeError, and `DecodeGraphs` decodes eagerly.
    """

    def __init__(self, required: bool) -> None:
        self._required = required
        # Each stream has a cuBLAS workspace (32 MiB on Hopper) that is never freed.
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None  # torch's handle
        self._failed: list[torch.cuda.CUDAGraph] = []  # the allocator may still refer to them

    def __call__(self, step: Step) -> Step:
        """Record ``step``, after a warm-up run."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                step()
                graph, result = self._record(step)
        except RuntimeError as error:
            if not self._required:
                raise
            raise UserError(
                f"cuda_graphs: a decode step cannot be captured: {first_line(error)}; leave "
                "cuda_graphs out to run such steps eagerly"
            ) from error
        finally:
            current.wait_stream(self._stream)

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay

    def _record(self, step: Step) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        # NOTE: in the default mode, any CUDA call of another thread would break the capture.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            result = step()
            graph.capture_end()
        except BaseException:
            self._abandon(graph, self._pool)
            self._pool = None
            raise
        return graph, result

    def _abandon(self, graph: torch.cuda.CUDAGraph, pool: Any) -> None:
        """Leave stream and allocator as they are without a capture."""
        self._failed.append(graph)
        with suppress(RuntimeError):  # raised for a capture that CUDA has invalidated
            graph.capture_end()
        with suppress(RuntimeError):  # raised unless `capture_end` failed before it did this
            device = torch.cuda.current_device()
            torch._C._cuda_endAllocateToPool(device, pool)
            torch._C._cuda_releasePool(device, pool)


def capture_for(device: torch.device, wanted: bool | None) -> Capture | None:
    """What records decode steps on ``device``; None: nothing does, they run eagerly.

    ``wanted``: True demands graphs, False turns them off, None takes them where it can.

    Raises:
        UserError: ``wanted`` is True on another device than CUDA.
    """
    if wanted and device.type != "cuda":
        raise UserError(f"cuda_graphs needs a CUDA device; this one is a {device.type}")
    if wanted is False or device.type != "cuda":
        return None
    return CudaCapture(required=wanted is True)


class DecodeGraphs:
    """Captured decode steps of ``decoder`` over ``cache``.

    Args:
        max_num_seqs, max_seq_len: the largest batch and length.
        capture: records a step.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        max_num_seqs: int,
        max_seq_len: int,
        capture: Capture,
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
        the longest sequence. ``in_order``: sequence b is in page b, whole. The logits are valid
        until the next call.

        Raises:
            UserError: the capture failed and `CudaCapture` requires it.
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
