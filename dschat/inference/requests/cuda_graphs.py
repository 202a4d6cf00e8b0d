"""Captures decode steps as CUDA graphs, one per bucket of batch size and kind of sampling.

A step computes a token of every row of a `DecodeState`, draws the next one and advances the rows. A
batch is padded to its bucket with dead rows, which write to the cache's trash page; lengths are
data. torch's attention gathers all pages that a row has room for in the step, so there are buckets
of them too; the kernel reads those in use. Weights are refreshed in place, so a graph outlives
optimizer steps; it is captured again only when weights or cache are reallocated.
"""

import logging
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from dschat.config.errors import UserError, first_line
from dschat.inference.model.attention import Attention, Decodes
from dschat.inference.model.kv_cache import KVCache
from dschat.inference.model.module_decoder import AnyDecoder
from dschat.inference.model.states import Carried, RowStates
from dschat.inference.model.step_kernels import StepKernels
from dschat.inference.requests.decode_state import DecodeState, DeviceQueue
from dschat.inference.requests.sampler import SamplingKind
from dschat.inference.requests.sequence import Sequence

logger = logging.getLogger("dschat")

Step = Callable[[], object]
Capture = Callable[[Step], Step]  # -> replay: runs the step on the present content of the state

# Narrower block tables would save little, and cost captures.
_FEWEST_TOKENS = 256

_BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


def batch_bucket(count: int, largest: int) -> int:
    """The batch size that ``count`` sequences are padded to, or pages; at most ``largest``."""
    beyond = -(-count // _BATCHES[-1]) * _BATCHES[-1]
    return min(next((b for b in _BATCHES if b >= count), beyond), max(largest, count))


@cache
def capture_stream() -> torch.cuda.Stream:
    """The stream that all of a process's engines capture on, the short-lived ones that evaluate a
    moving average too: each has a cuBLAS workspace (32 MiB on Hopper) that is never freed.
    """
    return torch.cuda.Stream()


class CudaCapture:
    """Records steps as CUDA graphs, all of them on one stream and in one memory pool.

    Unlike `torch.cuda.graph`, this neither waits for the device nor empties torch's memory cache,
    which training would have to fill again. ``required``: a failure is a `UserError`, which nothing
    catches; else a RuntimeError, and `DecodeGraphs` runs the steps as they are.
    """

    def __init__(self, required: bool) -> None:
        self._required = required
        self._pool: Any = None  # torch's handle
        # Never replayed. Without a graph, torch lets nothing more be captured into a pool.
        self._holds_pool: torch.cuda.CUDAGraph | None = None
        self._failed: list[torch.cuda.CUDAGraph] = []  # the allocator may still refer to them

    def __call__(self, step: Step) -> Step:
        """Record ``step``, after a warm-up run."""
        current, stream = torch.cuda.current_stream(), capture_stream()
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                step()
                return self._recorded(step).replay
        except Exception as error:  # torch's, or of Triton, which have no type in common
            if not self._required:
                raise
            raise UserError(
                f"cuda_graphs: a step cannot be captured: {first_line(error)}; leave cuda_graphs "
                "out to run such steps eagerly"
            ) from error
        finally:
            current.wait_stream(stream)

    def _recorded(self, step: Step) -> torch.cuda.CUDAGraph:
        with suppress(torch.OutOfMemoryError):
            return self._record(step)
        torch.cuda.empty_cache()  # the allocator does not do so while it captures
        return self._record(step)

    def _record(self, step: Step) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        self._begin(graph, self._pool)
        try:
            step()
            graph.capture_end()
        except BaseException:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns that a graph is empty
                if not self._abandon(graph, self._pool) or self._holds_pool is None:
                    self._pool = self._holds_pool = None
            raise
        self._holds_pool = self._holds_pool or graph
        return graph

    def _begin(self, graph: torch.cuda.CUDAGraph, pool: Any) -> None:
        # NOTE: in the default mode, any CUDA call of another thread would break the capture.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")

    def _abandon(self, graph: torch.cuda.CUDAGraph, pool: Any) -> bool:
        """Leave stream, allocator and random numbers as they are without a capture. Returns whether
        more may be captured into ``pool``.
        """
        try:
            graph.capture_end()
            graph.reset()  # gives its memory back
            is_sound = True
        except RuntimeError:  # CUDA has invalidated the capture
            self._failed.append(graph)
            with suppress(RuntimeError):  # raised unless `capture_end` failed before it did this
                device = torch.cuda.current_device()
                torch._C._cuda_endAllocateToPool(device, pool)
                torch._C._cuda_releasePool(device, pool)
            is_sound = False
        # The default generator draws for the failed graph until another capture ends well.
        with suppress(RuntimeError):
            empty = torch.cuda.CUDAGraph()
            self._begin(empty, torch.cuda.graph_pool_handle())
            empty.capture_end()
        return is_sound


class DecodeGraphs:
    """Captured decode steps of ``decoder`` over ``cache``, and the state that they advance.

    Args:
        max_num_seqs, max_seq_len: the largest batch and length.
        num_tokens: ids from this one on are never drawn.
        capture: records a step.
        queue: where the state's work is queued; default: the current stream.
        kernels: run the operations that they apply to.
    """

    def __init__(
        self,
        decoder: AnyDecoder,
        cache: KVCache,
        max_num_seqs: int,
        max_seq_len: int,
        num_tokens: int,
        capture: Capture,
        queue: DeviceQueue | None = None,
        kernels: StepKernels | None = None,
    ) -> None:
        self._decoder, self._cache, self._capture = decoder, cache, capture
        self._kernels, self._num_tokens = kernels, num_tokens
        self._version = decoder.weights.version
        num_rows, num_pages = min(max_num_seqs, cache.num_pages), cache.pages_for(max_seq_len)
        sizes = num_rows, num_pages, cache.page_size, cache.trash_page
        self.state = DecodeState(*sizes, decoder.weights.device, queue)
        self._row_states = None if cache.states is None else RowStates(cache.states, num_rows)
        self._num_stateful = 0  # rows whose states are in `_row_states`
        self._graphs: dict[tuple[int, int, SamplingKind], Step] = {}
        self.failed = False

    @property
    def is_current(self) -> bool:
        """Whether the captured addresses are still those of the weights."""
        return self._version == self._decoder.weights.version

    def size_for(self, count: int) -> int:
        """Rows of the step that ``count`` sequences take."""
        return batch_bucket(count, self.state.num_rows)

    def pages_for(self, count: int) -> int:
        """Pages of a row that the steps read of rows with ``count`` pages."""
        if self._kernels is not None and self._kernels.runs("attention"):
            return self.state.num_pages
        least = self._cache.pages_for(_FEWEST_TOKENS)
        num_pages = self.state.num_pages
        return batch_bucket(min(max(count, least), num_pages), num_pages)

    def enter(self, sequences: list[Sequence], kind: SamplingKind) -> None:
        """See `DecodeState.enter`; the rows have their recurrent states until they `leave`."""
        self.state.enter(sequences, kind)
        if self._row_states is not None:
            self._num_stateful = len(sequences)
            self._move_states(self._row_states.fetch)

    def leave(self) -> None:
        """Return the states of live rows to their slots, after the last step of the rows."""
        if self._row_states is not None and self._num_stateful:
            self._move_states(self._row_states.give_back)
            self._num_stateful = 0

    def _move_states(self, move: Callable[[Tensor], None]) -> None:
        pool, count = self._cache.states, self._num_stateful
        assert pool is not None

        @torch.inference_mode(False)
        @torch.no_grad()
        def moved() -> None:
            move(self.state.state_slots(count, pool.trash))

        self.state.queue.put(moved)

    @torch.inference_mode(False)
    @torch.no_grad()
    def step(self, size: int, pages: int, kind: SamplingKind) -> Step:
        """Replays the step of the first ``size`` rows and their first ``pages``, which is captured
        on first use; all rows are dead after that.

        Collective in the tensor-parallel group, as is each replay. After a capture that failed on a
        rank, steps run as they are on all, launch by launch.

        Raises:
            UserError: the capture failed, without kernels too, and `CudaCapture` requires it.
        """
        key = size, pages, kind
        if key in self._graphs:
            return self._graphs[key]
        self.state.sampling.prepare(kind)
        step = partial(self._run, size, pages, kind)
        if self.failed:
            return step
        problem = ""
        try:
            with self.state.asleep():
                self._graphs[key] = self._capture(step)
        except Exception as error:  # torch's, or of Triton, which have no type in common
            if isinstance(error, UserError) and self._kernels is None:
                raise
            problem = first_line(error)
        # NOTE: where one rank cannot, none does: a capture runs the step once, on all ranks.
        problem = max(self._decoder.weights.group.gather_objects(problem))
        if not problem:
            return self._graphs[key]
        self._graphs.clear()
        if self._kernels is None:
            self.failed = True
            logger.warning("CUDA graph capture failed, decoding eagerly: %s", problem)
            return step
        self._kernels = None
        message = "a decode step by Triton kernels failed, going on without them: %s"
        logger.warning(message, problem)
        return self.step(size, pages, kind)

    @torch.inference_mode()
    def _run(self, size: int, pages: int, kind: SamplingKind) -> None:
        """One step. NOTE: a number that this reads on the host is frozen in the graph."""
        decoder, cache, state, kernels = self._decoder, self._cache, self.state, self._kernels
        rows = state.rows(size, pages, kernels)
        longest = pages * cache.page_size
        decodes = Decodes(size, rows.lengths, longest, rows.table, ragged=True)
        attention = Attention(decoder.spec, cache, rows.slots, decodes, [], decoder.slopes)
        inputs = rows.tokens, rows.positions, attention
        if self._row_states is None:
            logits = decoder.step(*inputs, kernels=kernels)
        else:
            with self._row_states.of_step(size) as states:
                carried = Carried(states, size, num_ready=1)
                logits = decoder.step(*inputs, kernels=kernels, carried=carried)
        draws = kind, rows.key, rows.too_short, self._num_tokens
        drawn, logprobs = state.sampling.draw(logits, *draws, kernels)
        # Logits are the same on all ranks of a group; the broadcast guarantees the same tokens.
        state.advance(decoder.weights.group.broadcast(drawn), logprobs, kind, kernels)
