"""Captures steps of whole prompts as CUDA graphs, one per bucket of rows and length.

A prompt's step launches a dozen kernels a layer. Of few tokens, the device is done with each before
the host has launched the next: on an H200, 8 x 256 tokens of OPT-1.3B took 13 ms of the host and 9
of the device, 128 tokens of GPT-2 took 7 and 0.6.
"""

import logging
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dschat.config.errors import first_line
from dschat.inference.cuda_graphs import Capture, Step, batch_bucket
from dschat.inference.kernels.cuda.dispatch import StepKernels
from dschat.inference.model.attention import Attention, Chunk
from dschat.inference.model.decoder import Decoder
from dschat.inference.model.kv_cache import KVCache
from dschat.inference.sequence import StepSchedule

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

    ``capture``: records a step. ``kernels``: run the operations that they apply to, but attention.
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
        self._kernels = None if kernels is None else kernels.without("attention")
        self._version = decoder.weights.version
        self._logits: dict[int, Tensor] = {}  # by rows: graphs of all lengths write to them
        self.steps: dict[PaddedShape, tuple[Tensor, Step]] = {}  # inputs, see `_run`, and replay
        self._failed = False

    def shape_for(self, schedule: StepSchedule) -> PaddedShape | None:
        """What a captured step pads ``schedule`` to; None: it is computed as it is."""
        whole = all(s.computed == 0 and n == len(s) and not s.draft for s, n in schedule.chunks)
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
            self._failed = True
            self.steps.pop(shape, None)

    @torch.inference_mode()
    def _run(self, shape: PaddedShape, inputs: Tensor) -> None:
        """``inputs``: ids, positions and cache slots of rows that are all as long, of which the
        tokens after their own are of no account, and the token that each row is read at.
        """
        size = shape.rows * shape.length
        tokens, positions, slots, ready = inputs.split([size, size, size, shape.rows])
        chunks = [Chunk(i * shape.length, shape.length, 0, []) for i in range(shape.rows)]
        decoder = self._decoder
        attention = Attention(decoder.spec, self._cache, slots, None, chunks, decoder.slopes)
        logits = decoder.step(tokens, positions, attention, ready, self._kernels)
        if shape.rows not in self._logits:  # in the warm-up: no graph's own memory
            with torch.inference_mode(False):
                self._logits[shape.rows] = torch.empty_like(logits)
        self._logits[shape.rows].copy_(logits)
