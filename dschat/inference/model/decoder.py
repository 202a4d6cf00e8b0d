"""Runs the transformer decoder: packed token ids to hidden states and logits.

One implementation serves all families; a `ModelSpec` holds their differences. Tensor-parallel ranks
all-reduce after attention and after the MLP, and all-gather the logits. The caller passes attention
as a function, so the decoder is independent of the cache.

Shapes: T packed tokens, E hidden size, H and K this rank's query and key-value heads, D head size.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig
from transformers.activations import ACT2FN

from dschat.inference.kernels import cpu
from dschat.inference.kernels.cuda.dispatch import StepKernels
from dschat.inference.model.architectures import ModelSpec
from dschat.inference.model.attention import Attention
from dschat.inference.model.borrowed import HeadLayout
from dschat.inference.model.rotary import Rotary, alibi_slopes
from dschat.inference.model.weights import AnyLinear, Weights

# Layer, heads (T, H + 2 K, D), where q, k and v are among them -> (T, H * D)
Attend = Callable[[int, Tensor, HeadLayout], Tensor]

# torch's fused versions of activations that transformers composes of small operations.
_TANH_GELU = partial(F.gelu, approximate="tanh")
_FUSED: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu_,
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_new": _TANH_GELU,
    "gelu_fast": _TANH_GELU,
    "gelu_pytorch_tanh": _TANH_GELU,
}

# The CPU kernels run on one thread and read their operands once; torch's operations run on all
# threads and read them two to four times. Measured on two AVX-512 cores: equal at about a million
# elements (rows x MLP width), and the kernels are faster below.
_BREAK_EVEN_TIMES_THREADS = 1 << 21


class Decoder:
    """``num_positions``: the longest sequence, for the rotary tables."""

    def __init__(
        self, spec: ModelSpec, config: PretrainedConfig, weights: Weights, num_positions: int
    ) -> None:
        self.spec, self.weights = spec, weights
        self._group = weights.group
        self._activation = _FUSED.get(spec.activation) or ACT2FN[spec.activation]
        device, dtype = weights.device, weights.dtype
        self.rotary = None
        if spec.rotary:
            self.rotary = Rotary(config, spec.partial_rotary, num_positions, dtype, device)
        self.slopes = None
        if spec.alibi:
            slopes = alibi_slopes(spec.num_heads).view(self._group.size, weights.num_heads)
            self.slopes = slopes[self._group.rank].to(device)
        self._root_of_eps = torch.tensor(math.sqrt(spec.norm_eps), device=device)
        self._inverse_roots: dict[int, Tensor] = {}
        self._layers: list[_Layer] = []
        self._kernels: cpu.Kernels | None = None
        self._version = -1  # of the weights in `_layers`

    def step(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: Attention,
        ready: Tensor | None = None,
        kernels: StepKernels | None = None,
    ) -> Tensor:
        """Logits (R, V) of the rows ``ready`` of packed ids and positions (T,) int64; None: all.
        Collective in the tensor-parallel group.

        ``kernels``: of a captured step; those for the attention run it.
        """
        attend: Attend = attention
        if kernels is not None and kernels.runs("attention"):
            attend = kernels.attention(attention, self.rotary, self.weights.tensors)
        hidden = self.hidden(tokens, positions, attend, kernels)
        return self.logits(hidden if ready is None else hidden.index_select(0, ready), kernels)

    @torch.inference_mode()
    def hidden(
        self,
        tokens: Tensor,
        positions: Tensor,
        attend: Attend,
        kernels: StepKernels | None = None,
    ) -> Tensor:
        """Hidden states before the head: ids and positions (T,) int64 -> (T, embedding size).
        Collective in the tensor-parallel group.

        If ``kernels`` run the attention, ``attend`` is theirs: it gets heads before their norms and
        rotation.
        """
        if self._version != self.weights.version:
            self._look_up()
        h, added = self._embed(tokens, positions, kernels), None
        step = self._step(positions, attend, kernels)
        for i in range(self.spec.num_layers):
            h, added = self._layer(i, h, added, step)
        if self._final_norm is not None:
            h = self._add_norm(self._final_norm, h, added, step)
        elif added is not None:
            h = h.add_(added)
        if "project_out" in self.weights.linears:
            h = self.weights.linears["project_out"](h)
        return h

    @torch.inference_mode()
    def logits(self, hidden: Tensor, kernels: StepKernels | None = None) -> Tensor:
        """(R, embedding size) -> (R, V), whole on every rank. Collective in the group."""
        head = self.weights.linears["head"]
        local = head(hidden) if kernels is None else kernels.linear(head, hidden)
        if self._group.size == 1:
            return local
        logits = self._group.all_gather(local).transpose(0, 1).flatten(1)  # R may be 0
        return logits[:, : self.spec.vocab_size]

    def _embed(self, tokens: Tensor, positions: Tensor, kernels: StepKernels | None) -> Tensor:
        weights, spec = self.weights, self.spec
        table = weights.tensors["embed.weight"]
        is_plain = self._group.size == 1 and "project_in" not in weights.linears
        if kernels is not None and is_plain and kernels.runs("state"):
            of_positions = weights.tensors["positions.weight"] if spec.num_positions else None
            h = kernels.embed(tokens, table, positions, of_positions, spec.position_offset)
            return h if self._embed_norm is None else self._norm(self._embed_norm, h)
        if self._group.size == 1:
            h = F.embedding(tokens, table)
        else:  # each rank has some rows; those of other ranks are zero here, then summed
            local = tokens - self._group.rank * weights.vocab_size
            absent = (local < 0) | (local >= weights.vocab_size)
            h = F.embedding(local.masked_fill(absent, 0), table)
            h = self._group.all_reduce_sum(h.masked_fill_(absent.unsqueeze(1), 0.0))
        if "project_in" in weights.linears:
            h = weights.linears["project_in"](h)
        if spec.num_positions:
            table = weights.tensors["positions.weight"]
            h = h + F.embedding(positions + spec.position_offset, table)
        return h if self._embed_norm is None else self._norm(self._embed_norm, h)

    def _step(self, positions: Tensor, attend: Attend, cuda: StepKernels | None) -> "_Step":
        if cuda is not None and cuda.runs("attention"):
            return _Step(attend, cuda=cuda, attend_rotates=True)
        kernels, rotary = self._kernels if cuda is None else None, self.rotary
        widest = self.weights.intermediate_size * (2 if self.spec.gated else 1)
        threads = torch.get_num_threads()
        if threads > 1 and positions.shape[0] * widest * threads > _BREAK_EVEN_TIMES_THREADS:
            kernels = None
        if rotary is None:
            return _Step(attend, kernels, cuda=cuda)
        if kernels is None:
            rotate = partial(rotary.rotate_, rows=rotary.rows(positions))
            return _Step(attend, rotate=rotate, cuda=cuda)
        return _Step(attend, kernels, rotary=(positions, rotary.cos, rotary.sin))

    def _look_up(self) -> None:
        """Collect each layer's weights, so that a step does not look them up by name."""
        weights = self.weights
        tensors, linears = weights.tensors, weights.linears

        def norm(name: str) -> _Norm:
            return _Norm(tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

        def optional_norm(name: str) -> _Norm | None:
            return norm(name) if f"{name}.weight" in tensors else None

        def qk_norms(layer: str) -> tuple[_Norm, _Norm] | None:
            q_norm, k_norm = optional_norm(f"{layer}.q_norm"), optional_norm(f"{layer}.k_norm")
            return None if q_norm is None or k_norm is None else (q_norm, k_norm)

        def layer(name: str) -> _Layer:
            qkv, out, up, down = (linears[f"{name}.{n}"] for n in ("qkv", "out", "up", "down"))
            return _Layer(
                norm(f"{name}.norm1"),
                norm(f"{name}.norm2"),
                qk_norms(name),
                qkv,
                out,
                up,
                down,
                HeadLayout.of(
                    weights.num_heads, weights.num_kv_heads, qkv.order or "qkv", qkv.interleaved
                ),
                up.order != ("up", "gate"),
            )

        self._embed_norm = optional_norm("embed_norm")
        self._final_norm = optional_norm("final_norm")
        self._layers = [layer(f"layers.{i}") for i in range(self.spec.num_layers)]
        self._version = weights.version
        # The CPU kernels read queries, keys, values and gate, up in this order.
        in_order = all(w.layout.in_order and w.is_gate_first for w in self._layers)
        if weights.device.type == "cpu" and weights.dtype == torch.float32:
            self._kernels = cpu.load() if in_order else None
        layers = (n for w in self._layers for n in (w.norm1, w.norm2, *(w.qk_norms or ())))
        for n in (self._embed_norm, self._final_norm, *layers):
            assert n is None or (n.weight.is_contiguous() and n.weight.dtype == weights.dtype)

    def _layer(
        self, i: int, h: Tensor, added: Tensor | None, step: "_Step"
    ) -> tuple[Tensor, Tensor | None]:
        """Takes and returns the residual stream ``h`` and the term still to be added to it."""
        spec, w = self.spec, self._layers[i]
        add_up = self._group.all_reduce_sum
        x = self._add_norm(w.norm1, h, added, step) if spec.pre_norm else h
        heads = self._heads(w, step.product(w.qkv, x), step)
        mixed = step.product(w.out, step.attend(i, heads, w.layout))
        if spec.parallel_residual:
            mixed.add_(self._mlp(w, self._add_norm(w.norm2, h, None, step), step))
            return h, add_up(mixed)
        if not spec.pre_norm:
            h = self._add_norm(w.norm1, h, add_up(mixed), step)
            return self._add_norm(w.norm2, h, add_up(self._mlp(w, h, step)), step), None
        h = x if spec.residual_after_norm else h
        x = self._add_norm(w.norm2, h, add_up(mixed), step)
        return (x if spec.residual_after_norm else h), add_up(self._mlp(w, x, step))

    def _heads(self, w: "_Layer", qkv: Tensor, step: "_Step") -> Tensor:
        """Query, key and value heads (T, H + 2 K, D), in the order of ``w.layout``; rotated where
        positions are rotary, unless `_Step.attend` does that.
        """
        num_heads, num_kv_heads = self.weights.num_heads, self.weights.num_kv_heads
        heads = qkv.view(qkv.shape[0], -1, self.spec.head_size)
        if step.attend_rotates:
            return heads
        if step.kernels is not None:
            if w.qk_norms is not None or step.rotary is not None:
                norms = None
                if w.qk_norms is not None:
                    q_norm, k_norm = w.qk_norms
                    norms = (q_norm.weight, k_norm.weight, self.spec.norm_eps)
                step.kernels.norm_and_rotate(heads, num_heads, num_kv_heads, norms, step.rotary)
            return heads
        if w.qk_norms is not None:
            for norm, part in zip(w.qk_norms, (w.layout.q, w.layout.k), strict=True):
                heads[:, part].copy_(self._norm(norm, heads[:, part]))
        if step.rotate is not None:
            for part in w.layout.rotated:
                step.rotate(heads[:, part])
        return heads

    def _mlp(self, w: "_Layer", x: Tensor, step: "_Step") -> Tensor:
        """This rank's partial sum of the MLP."""
        spec, cuda = self.spec, step.cuda
        if cuda is not None and cuda.takes(w.up, x, spec.activation):
            inner = cuda.product(w.up, x, spec.activation, spec.gated, w.is_gate_first)
            return cuda.linear(w.down, inner)
        inner = step.product(w.up, x)
        if not spec.gated:
            inner = self._activation(inner)
        elif step.kernels is not None and self._activation is F.silu:
            inner = step.kernels.silu_mul(inner)
        else:
            halves = inner.chunk(2, dim=-1)
            gate, up = halves if w.is_gate_first else halves[::-1]
            inner = self._activation(gate).mul_(up)
        return step.product(w.down, inner)

    def _add_norm(self, norm: "_Norm", h: Tensor, added: Tensor | None, step: "_Step") -> Tensor:
        """``h`` += ``added``, in place; returns its norm."""
        if step.kernels is not None:
            return step.kernels.add_norm(h, added, norm.weight, norm.bias, self.spec.norm_eps)
        if step.cuda is not None and step.cuda.runs("norm"):
            return step.cuda.add_norm(h, added, norm.weight, norm.bias, self.spec.norm_eps)
        return self._norm(norm, h if added is None else h.add_(added))

    def _norm(self, norm: "_Norm", x: Tensor) -> Tensor:
        weight, eps = norm.weight, self.spec.norm_eps
        if norm.bias is not None:
            return F.layer_norm(x, weight.shape, weight, norm.bias, eps)
        if x.is_cuda or x.dtype != torch.float32:
            return F.rms_norm(x, weight.shape, weight, eps)
        # x / sqrt(mean(x^2) + eps): takes less than half the time of F.rms_norm on a CPU.
        # Constants are tensors: a Python number would be converted in every call.
        norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        norms.mul_(self._inverse_root(weight.shape[0])).hypot_(self._root_of_eps)
        return x.div(norms).mul_(weight)

    def _inverse_root(self, size: int) -> Tensor:
        if size not in self._inverse_roots:
            self._inverse_roots[size] = torch.tensor(1 / math.sqrt(size))
        return self._inverse_roots[size]


class _Step(NamedTuple):
    """State that the layers of one step share."""

    attend: Attend
    kernels: cpu.Kernels | None = None  # None: torch's operations (GPUs, large steps)
    # With kernels: positions (T,), then cos and sin of all positions.
    rotary: tuple[Tensor, Tensor, Tensor] | None = None
    rotate: Callable[[Tensor], None] | None = None  # without kernels: rotates heads in place
    cuda: StepKernels | None = None
    attend_rotates: bool = False  # and applies the norms of query and key

    def product(self, linear: AnyLinear, x: Tensor) -> Tensor:
        return linear(x) if self.cuda is None else self.cuda.linear(linear, x)


class _Norm(NamedTuple):
    weight: Tensor
    bias: Tensor | None  # None: RMS norm


class _Layer(NamedTuple):
    """A layer's weights, collected once per version."""

    norm1: _Norm
    norm2: _Norm
    qk_norms: tuple[_Norm, _Norm] | None
    qkv: AnyLinear
    out: AnyLinear
    up: AnyLinear
    down: AnyLinear
    layout: HeadLayout  # of the output of `qkv`
    is_gate_first: bool  # in the output of `up`
