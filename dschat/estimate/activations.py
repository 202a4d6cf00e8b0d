"""Measures the memory of a forward and backward pass by running it on the meta device.

The pass is the real one (packed rows, the model's own forward, the head in chunks, gradient
checkpointing), so there are no formulas per architecture. A `Pass` records how many bytes are live
at every point.

Fused attention is assumed to save queries, keys, values, output and one number per row, never a
(T, T) matrix, as torch's flash and memory-efficient kernels do, on a CPU too.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from dschat.models.packing import PackedRows, Segments, pack
from dschat.models.packing.attention import PackedAttention

# glibc returns freed blocks of at least this size to the system. The process may keep smaller ones
# (malloc's dynamic mmap threshold grows up to this).
LARGE_BLOCK = 32 * 2**20

Work = Literal["sft", "policy", "value"]


class Batch(NamedTuple):
    """Rows of equal length, and how many columns of each a pass reads. ``num_prompts``: prompts of
    ``prompt_len`` tokens that the rows share; 0: none is shared.
    """

    num_rows: int
    seq_len: int
    num_read: int
    num_prompts: int = 0
    prompt_len: int = 0


class Interval(NamedTuple):
    """Peak of live bytes between the completion of two gradients.

    Complete gradients are not included.
    """

    num_done: int  # gradient elements complete so far
    live: int
    logits: int  # the part of `live` that is (..., V): logits, probabilities, their gradients
    large: int  # peak of live bytes in blocks of LARGE_BLOCK or more
    large_logits: int

    def grown(self, smaller: "Interval", steps: int) -> "Interval":
        """This, and ``steps`` times what it has more than ``smaller``."""
        return Interval(*(a + steps * (a - b) for a, b in zip(self, smaller, strict=True)))


class Pass(NamedTuple):
    """One forward pass, with its backward pass in training."""

    intervals: tuple[Interval, ...]
    small: int  # peak of live bytes in blocks below LARGE_BLOCK

    def peak(
        self, bytes_per_gradient: int, all_gradients: bool, retained: int | None
    ) -> tuple[int, int, int]:
        """Bytes of (activations, logits, gradients) where their sum is largest.

        Args:
            bytes_per_gradient: that a complete gradient element takes until the step.
            all_gradients: all gradients exist from the start, from an earlier micro-batch.
            retained: None if freed memory is reused (a GPU). A CPU's malloc retains freed small
                blocks: at least this many bytes, from other passes.
        """
        num_trained = self.intervals[-1].num_done
        peak = (0, 0, 0)
        for num_done, live, logits, large, large_logits in self.intervals:
            if retained is not None:
                live, logits = max(self.small, retained) + large, large_logits
            done = num_trained if all_gradients else num_done
            peak = max(peak, (live - logits, logits, done * bytes_per_gradient), key=sum)
        return peak

    def extended(self, smaller: "Pass", steps: int) -> "Pass":
        """This pass with ``steps`` more equal layers; ``smaller`` has one less than this.

        Memory is linear in the number of layers until the backward pass reaches a layer. The middle
        layers add no new peaks, so the intervals of the two passes are matched from both ends.
        """
        more, fewer = self.intervals, smaller.intervals
        first = len(fewer) // 2 if len(more) > len(fewer) else len(fewer)
        last = more[len(more) - len(fewer) + first :]
        pairs = zip((*more[:first], *last), fewer, strict=True)
        small = self.small + steps * (self.small - smaller.small)
        return Pass(tuple(large.grown(small, steps) for large, small in pairs), small)


def run_pass(module: nn.Module, work: Work, batch: Batch, train: bool, vocab_size: int) -> Pass:
    """Run ``work`` on ``module`` (meta device): a `LanguageModel`, or for "value" a `ScoreModel`.

    sft: log-probs of the next tokens. policy: the same, and without ``train`` entropies too. value:
    scores. ``train`` also runs the backward pass, with dropout on.

    Returns:
        The live memory without parameters, buffers, rows and complete gradients.
    """
    ids = np.zeros((batch.num_rows, batch.seq_len), np.int64)
    shared = None
    if batch.num_prompts:
        ids[:, 0] = np.arange(batch.num_rows) * batch.num_prompts // batch.num_rows
        shared = [batch.prompt_len] * batch.num_rows
    # Rows read their first columns: memory does not depend on which.
    rows = pack(list(ids), [range(batch.num_read)] * batch.num_rows, shared).to("meta")
    ledger = _Ledger(module, rows, vocab_size if work != "value" else 0)
    trained = [p for p in module.parameters() if p.requires_grad] if train else []
    handles = [p.register_post_accumulate_grad_hook(ledger.gradient_done) for p in trained]
    module.train(train)
    try:
        with torch.set_grad_enabled(train), _fused_attention(), ledger:
            loss = _loss(module, rows, work)
            if train:
                loss.backward()
    finally:
        for handle in handles:
            handle.remove()
        module.zero_grad()
    return ledger.result()


def _loss(module: nn.Module, rows: PackedRows, work: Work) -> Tensor:
    """A loss with the operations of ``work``'s; without gradients on, what scoring computes."""
    if work == "value":
        return module(rows).square().sum()
    if work == "sft":
        return -module(rows)[0].sum()
    logprobs, _ = module(rows, with_entropy=not torch.is_grad_enabled())
    return logprobs.exp().sum()


class _Ledger(TorchDispatchMode):
    """Tracks the lifetime of every storage. Recognizes logits by their last dimension; with
    ``vocab_size`` 0 there are none.
    """

    def __init__(self, module: nn.Module, rows: PackedRows, vocab_size: int) -> None:
        super().__init__()
        self._vocab_size = vocab_size
        inputs = [value for value in vars(rows).values() if isinstance(value, Tensor)]
        owned = [*module.parameters(), *module.buffers(), *inputs]
        self._known = {t.untyped_storage()._cdata for t in owned}
        # live, logits among them: of all blocks, of large ones
        self._all = self._large = (0, 0)
        self._peak_all, self._peak_large = self._all, self._large
        self._peak_small = self._num_done = 0
        self._intervals: list[Interval] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001
        if func is torch.ops.aten._local_scalar_dense.default:
            # A forward reads values only to check that masks are all ones and positions ascend.
            return True
        out = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, self._track, out)
        return out

    def _track(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._known:
            return
        size = storage.nbytes()
        is_logits = tensor.dim() > 1 and tensor.shape[-1] == self._vocab_size > 0
        self._known.add(storage._cdata)
        self._add(size, is_logits)
        weakref.finalize(storage, self._freed, storage._cdata, size, is_logits).atexit = False
        self._peak_all = max(self._peak_all, self._all)
        self._peak_large = max(self._peak_large, self._large)
        self._peak_small = max(self._peak_small, self._all[0] - self._large[0])

    def _add(self, size: int, is_logits: bool) -> None:
        self._all = self._all[0] + size, self._all[1] + is_logits * size
        if abs(size) >= LARGE_BLOCK:
            self._large = self._large[0] + size, self._large[1] + is_logits * size

    def _freed(self, key: int, size: int, is_logits: bool) -> None:
        self._known.discard(key)
        self._add(-size, is_logits)

    def gradient_done(self, parameter: Tensor) -> None:
        """Hook of ``parameter``: drop its complete gradient and begin the next interval."""
        parameter.grad = None
        self._end_interval()
        self._num_done += parameter.numel()

    def _end_interval(self) -> None:
        self._intervals.append(Interval(self._num_done, *self._peak_all, *self._peak_large))
        self._peak_all, self._peak_large = self._all, self._large

    def result(self) -> Pass:
        self._end_interval()
        return Pass(tuple(self._intervals), self._peak_small)


@contextmanager
def _fused_attention() -> Iterator[None]:
    """Context in which attention over padded rows saves what fused kernels save, as that over
    packed rows does.

    On the meta device torch uses the fallback that allocates (T, T) matrices. NOTE: a function mode
    does not work here: it is off while checkpointed layers are recomputed.
    """
    original = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = lambda q, k, v, *_, **__: PackedAttention.apply(
        q, k, v, Segments(()), 1.0
    )
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original
