"""What a forward and backward pass holds in memory, found by running it without any memory.

A module on the meta device and a batch shape come in; a ``Pass`` goes out: how many bytes are live
at every point of the pass. The pass is the real one: the model's own forward, dschat's losses,
gradient checkpointing. So nothing here knows architectures. It must not know ZeRO, devices or
steps, nor what a byte is for beyond "logits" and "the rest".

Fused attention is taken to keep queries, keys, values, output and one number a row, never a
(T, T) matrix: what torch's flash and memory-efficient kernels do, on a CPU too.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from dschat.losses import entropy_from_logits, lm_loss, token_logprobs

# glibc returns blocks from this size on to the system as soon as they are free; smaller ones stay
# with the process once it has had many (malloc's dynamic mmap threshold grows up to this).
LARGE_BLOCK = 32 * 2**20

Work = Literal["sft", "policy", "value"]


@dataclass(frozen=True)
class Stretch:
    """The most that was live (bytes) after ``num_done`` gradient elements were complete, and before
    the next. Gradients that are complete are not counted.
    """

    num_done: int
    live: int
    logits: int  # the part of `live` that is (B, T, V)
    large: int  # the most that was live in blocks of LARGE_BLOCK or more
    large_logits: int


@dataclass(frozen=True)
class Pass:
    """One forward pass, with its backward pass where something is trained."""

    stretches: tuple[Stretch, ...]
    small: int  # the most that was live in blocks below LARGE_BLOCK, bytes

    def peak(
        self, bytes_per_gradient: int, all_gradients: bool, kept: int | None
    ) -> tuple[int, int, int]:
        """Bytes of (activations, logits, gradients) where their sum is largest.

        Args:
            bytes_per_gradient: what a complete gradient element takes until the step.
            all_gradients: all of them are there from the beginning (an earlier micro-batch's).
            kept: None where freed memory can be had again (a GPU). A CPU's malloc keeps freed small
                blocks: this many bytes at least, from other passes.
        """
        num_trained = self.stretches[-1].num_done
        best = (0, 0, 0)
        for s in self.stretches:
            done = num_trained if all_gradients else s.num_done
            live, logits = s.live, s.logits
            if kept is not None:
                live, logits = max(self.small, kept) + s.large, s.large_logits
            here = (live - logits, logits, done * bytes_per_gradient)
            best = max(best, here, key=sum)
        return best

    def extended(self, smaller: "Pass", steps: int) -> "Pass":
        """This pass with ``steps`` more equal layers, or more rows; ``smaller`` has one less.

        All that lives grows by the same amount with every row of the batch. With every layer too,
        before the backward pass reaches it; so of the layers between the first and the last these
        two tell all, and they are found by counting from either end.
        """
        ours, theirs = self.stretches, smaller.stretches
        first = len(theirs) // 2 if len(ours) > len(theirs) else len(theirs)
        last = len(theirs) - first
        pairs = list(zip(ours[:first], theirs[:first], strict=True))
        pairs += zip(ours[len(ours) - last :], theirs[first:], strict=True)

        def grown(large: Stretch, small: Stretch) -> Stretch:
            both = zip(astuple(large), astuple(small), strict=True)
            return Stretch(*(a + steps * (a - b) for a, b in both))

        small = self.small + steps * (self.small - smaller.small)
        return Pass(tuple(grown(*pair) for pair in pairs), small)


def run_pass(
    module: nn.Module, work: Work, num_rows: int, seq_len: int, train: bool, vocab_size: int
) -> Pass:
    """Run ``work`` on ``module`` (meta device): a causal LM, or for "value" a ``ScoreModel``.

    sft: logits of every token and their cross entropy; policy: log-probs of what the logits
    predict, entropies too where nothing is trained; value: a score of every token. ``train`` runs
    the backward pass as well, with dropout on.

    Returns:
        What lives beyond parameters, buffers and complete gradients.
    """
    ids = torch.zeros(num_rows, seq_len, dtype=torch.int64, device="meta")
    scores = num_rows * vocab_size if work != "value" else 0
    ledger = _Ledger(module, vocab_size, {scores * (seq_len - 1), scores * seq_len} - {0})
    trained = [p for p in module.parameters() if p.requires_grad] if train else []
    handles = [p.register_post_accumulate_grad_hook(ledger.gradient_done) for p in trained]
    module.train(train)
    try:
        with torch.set_grad_enabled(train), _fused_attention(), ledger:
            loss = _WORK[work](module, ids)
            if train:
                loss.backward()
    finally:
        for handle in handles:
            handle.remove()
        module.zero_grad()
    return ledger.result()


def _sft(module: nn.Module, ids: Tensor) -> Tensor:
    logits = module(input_ids=ids, use_cache=False).logits
    return lm_loss(logits, ids, torch.ones_like(ids, dtype=torch.bool))[0]


def _policy(module: nn.Module, ids: Tensor) -> Tensor:
    logits = module(input_ids=ids, use_cache=False).logits[:, :-1]
    logprobs = token_logprobs(logits, ids[:, 1:])
    if not logprobs.requires_grad:
        entropy_from_logits(logits)
    return logprobs.exp().sum()


def _value(module: nn.Module, ids: Tensor) -> Tensor:
    return module(ids).square().sum()


_WORK: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "sft": _sft,
    "policy": _policy,
    "value": _value,
}


class _Ledger(TorchDispatchMode):
    """Counts every storage while it lives. Logits are known by their last dimension and number."""

    def __init__(self, module: nn.Module, vocab_size: int, logits_numels: set[int]) -> None:
        super().__init__()
        self._vocab_size, self._logits_numels = vocab_size, logits_numels
        owned = [*module.parameters(), *module.buffers()]
        self._known = {t.untyped_storage()._cdata for t in owned}
        self._live = self._logits = self._large = self._large_logits = 0
        self._most_small = self._num_done = 0
        self._stretches: list[Stretch] = []
        self._begin_stretch()

    def _begin_stretch(self) -> None:
        self._most = (self._live, self._logits)
        self._most_large = (self._large, self._large_logits)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001
        if func is torch.ops.aten._local_scalar_dense.default:
            # A forward asks about values only whether masks are all ones and positions ascend.
            return True
        out = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, self._see, out)
        return out

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._known:
            return
        size = storage.nbytes()
        is_logits = tensor.numel() in self._logits_numels and tensor.shape[-1] == self._vocab_size
        self._known.add(storage._cdata)
        self._add(size, is_logits)
        weakref.finalize(storage, self._gone, storage._cdata, size, is_logits).atexit = False
        self._most = max(self._most, (self._live, self._logits))
        self._most_large = max(self._most_large, (self._large, self._large_logits))
        self._most_small = max(self._most_small, self._live - self._large)

    def _add(self, size: int, is_logits: bool) -> None:
        large = size if abs(size) >= LARGE_BLOCK else 0
        self._live += size
        self._large += large
        if is_logits:
            self._logits += size
            self._large_logits += large

    def _gone(self, key: int, size: int, is_logits: bool) -> None:
        self._known.discard(key)
        self._add(-size, is_logits)

    def gradient_done(self, parameter: Tensor) -> None:
        """A hook of ``parameter``: its gradient is complete, and somebody else's to count."""
        parameter.grad = None
        self._end_stretch()
        self._num_done += parameter.numel()
        self._begin_stretch()

    def _end_stretch(self) -> None:
        self._stretches.append(Stretch(self._num_done, *self._most, *self._most_large))

    def result(self) -> Pass:
        self._end_stretch()
        return Pass(tuple(self._stretches), self._most_small)


@contextmanager
def _fused_attention() -> Iterator[None]:
    """A scope in which attention keeps what fused kernels keep.

    On the meta device torch takes its fallback, which makes (T, T) matrices. NOTE: a function mode
    would not do, for it is off while checkpointed layers are recomputed.
    """
    kept = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = lambda q, k, v, *_, **__: _Attention.apply(q, k, v)
    try:
        yield
    finally:
        F.scaled_dot_product_attention = kept


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        num_rows, num_heads, seq_len, _ = q.shape
        # The kernels lay their output out by token, so that joining the heads moves nothing.
        out = q.new_empty(num_rows, seq_len, num_heads, v.shape[-1]).transpose(1, 2)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:3], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(t) for t in ctx.saved_tensors[:3])
