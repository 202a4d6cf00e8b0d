"""Measures the memory of a forward and backward pass by running it on the meta device.

The pass is the real one (packed rows, the model's own forward, the head in chunks, gradient
checkpointing), so there are no formulas per architecture.

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


def run_pass(module: nn.Module, work: Work, batch: Batch, train: bool) -> int:
    """Run ``work`` on ``module`` (meta device): a `LanguageModel`, or for "value" a `ScoreModel`.

    sft: log-probs of the next tokens. policy: the same, and without ``train`` entropies too. value:
    scores. ``train`` also runs the backward pass, with dropout on.

    Returns:
        Peak of live bytes, without parameters, buffers, rows and complete gradients.
    """
    ids = np.zeros((batch.num_rows, batch.seq_len), np.int64)
    shared = None
    if batch.num_prompts:
        ids[:, 0] = np.arange(batch.num_rows) * batch.num_prompts // batch.num_rows
        shared = [batch.prompt_len] * batch.num_rows
    # Rows read their first columns: memory does not depend on which.
    rows = pack(list(ids), [range(batch.num_read)] * batch.num_rows, shared).to("meta")
    ledger = _Ledger(module, rows)
    trained = [p for p in module.parameters() if p.requires_grad] if train else []
    handles = [p.register_post_accumulate_grad_hook(_drop_gradient) for p in trained]
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
    return ledger.peak


def _loss(module: nn.Module, rows: PackedRows, work: Work) -> Tensor:
    """A loss with the operations of ``work``'s; without gradients on, what scoring computes."""
    if work == "value":
        return module(rows).square().sum()
    if work == "sft":
        return -module(rows)[0].sum()
    logprobs, _ = module(rows, with_entropy=not torch.is_grad_enabled())
    return logprobs.exp().sum()


class _Ledger(TorchDispatchMode):
    """Tracks the lifetime of every storage."""

    def __init__(self, module: nn.Module, rows: PackedRows) -> None:
        super().__init__()
        inputs = [value for value in vars(rows).values() if isinstance(value, Tensor)]
        owned = [*module.parameters(), *module.buffers(), *inputs]
        self._known = {t.untyped_storage()._cdata for t in owned}
        self._live = self.peak = 0

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
        self._known.add(storage._cdata)
        self._live += size
        self.peak = max(self.peak, self._live)
        weakref.finalize(storage, self._freed, storage._cdata, size).atexit = False

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._live -= size


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


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
