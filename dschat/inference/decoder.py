"""The one decoder of all families: packed tokens in, hidden states and logits out.

It reads a `ModelSpec` for what differs between families, and this rank's `Weights`. Tensor-parallel
ranks add up partial sums after attention and after the MLP, and join their parts of the vocabulary.
It must not know sequences, caches or sampling: attention is handed in.

Shapes: T packed tokens, E hidden size, H and K this rank's query and key-value heads, D head size.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from dschat.inference.arch import ModelSpec
from dschat.inference.positions import Rotary, alibi_slopes
from dschat.inference.weights import Weights

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # layer, q, k, v -> (T, H * D)

# transformers' compositions of small operations, as torch's fused ones.
_TANH_GELU = partial(F.gelu, approximate="tanh")
_FUSED = {
    "relu": F.relu_,
    "silu": partial(F.silu, inplace=True),
    "swish": partial(F.silu, inplace=True),
    "gelu": F.gelu,
    "gelu_new": _TANH_GELU,
    "gelu_fast": _TANH_GELU,
    "gelu_pytorch_tanh": _TANH_GELU,
}


class Decoder:
    """``num_positions``: the longest sequence it will see, for the rotary tables."""

    def __init__(self, spec: ModelSpec, config: Any, weights: Weights, num_positions: int) -> None:
        self.spec, self.weights = spec, weights
        self._group = weights.group
        self._activation = _FUSED.get(spec.activation) or ACT2FN[spec.activation]
        device, dtype = weights.device, weights.dtype
        self._rotary = Rotary(config, num_positions, dtype, device) if spec.rotary else None
        self.slopes = None
        if spec.alibi:
            mine = slice(self._group.rank * weights.num_heads, None)
            self.slopes = alibi_slopes(spec.num_heads)[mine][: weights.num_heads].to(device)
        self._layer_names = [f"layers.{i}." for i in range(spec.num_layers)]

    @torch.inference_mode()
    def hidden(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states before the head: ids and positions (T,) int64 -> (T, embedding size)."""
        h = self._embed(tokens, positions)
        rows = self._rotary.rows(positions) if self._rotary is not None else None
        for i in range(self.spec.num_layers):
            h = self._layer(i, h, rows, attend)
        tensors = self.weights.tensors
        if "final_norm.weight" in tensors:
            h = self._norm("final_norm", h)
        if "project_out" in self.weights.linears:
            h = self.weights.linears["project_out"](h)
        return h

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """(R, embedding size) -> (R, V), whole on every rank."""
        mine = self.weights.linears["head"](hidden)
        if self._group.size == 1:
            return mine
        joined = self._group.all_gather(mine).transpose(0, 1).reshape(mine.shape[0], -1)
        return joined[:, : self.spec.vocab_size]

    def _embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        weights, spec = self.weights, self.spec
        table = weights.tensors["embed.weight"]
        if self._group.size == 1:
            h = F.embedding(tokens, table)
        else:  # each rank has some rows: the others' are zero here, and summed
            local = tokens - self._group.rank * weights.vocab_size
            absent = (local < 0) | (local >= weights.vocab_size)
            h = F.embedding(local.masked_fill(absent, 0), table)
            h = self._group.all_reduce_sum(h.masked_fill_(absent.unsqueeze(1), 0.0))
        if "project_in" in weights.linears:
            h = weights.linears["project_in"](h)
        if spec.num_positions:
            table = weights.tensors["positions.weight"]
            h = h + F.embedding(positions + spec.position_offset, table)
        return self._norm("embed_norm", h) if "embed_norm.weight" in weights.tensors else h

    def _layer(
        self, i: int, h: Tensor, rows: tuple[Tensor, Tensor] | None, attend: Attend
    ) -> Tensor:
        spec, name = self.spec, self._layer_names[i]
        linears, add_up = self.weights.linears, self._group.all_reduce_sum
        x = self._norm(f"{name}norm1", h) if spec.pre_norm else h
        q, k, v = self._heads(i, linears[f"{name}qkv"](x), rows)
        mixed = linears[f"{name}out"](attend(i, q, k, v))
        if spec.parallel_residual:
            return h + add_up(mixed.add_(self._mlp(name, self._norm(f"{name}norm2", h))))
        h = add_up(mixed).add_(x if spec.residual_after_norm else h)
        if not spec.pre_norm:
            h = self._norm(f"{name}norm1", h)
        x = self._norm(f"{name}norm2", h) if spec.pre_norm else h
        h = add_up(self._mlp(name, x)).add_(x if spec.residual_after_norm else h)
        return h if spec.pre_norm else self._norm(f"{name}norm2", h)

    def _heads(
        self, i: int, qkv: Tensor, rows: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (T, H, D), keys and values (T, K, D), rotated where positions are rotary."""
        num_heads, num_kv_heads = self.weights.num_heads, self.weights.num_kv_heads
        heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, self.spec.head_size)
        turning, v = heads.split([num_heads + num_kv_heads, num_kv_heads], dim=1)
        name = self._layer_names[i]
        if f"{name}q_norm.weight" in self.weights.tensors:
            q, k = turning.split([num_heads, num_kv_heads], dim=1)
            turning = torch.cat(
                [self._norm(f"{name}q_norm", q), self._norm(f"{name}k_norm", k)], dim=1
            )
        if rows is not None:
            turning = self._rotary.rotate(turning, rows)
        q, k = turning.split([num_heads, num_kv_heads], dim=1)
        return q, k, v

    def _mlp(self, name: str, x: Tensor) -> Tensor:
        """This rank's partial sum."""
        linears = self.weights.linears
        inner = linears[f"{name}up"](x)
        if self.spec.gated:
            gate, up = inner.chunk(2, dim=-1)
            inner = self._activation(gate).mul_(up)
        else:
            inner = self._activation(inner)
        return linears[f"{name}down"](inner)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        tensors = self.weights.tensors
        weight, eps = tensors[f"{name}.weight"], self.spec.norm_eps
        if self.spec.norm == "layernorm":
            return F.layer_norm(x, weight.shape, weight, tensors[f"{name}.bias"], eps)
        if x.is_cuda:
            return F.rms_norm(x, weight.shape, weight, eps)
        # On a CPU F.rms_norm is twice as many small operations.
        wide = x.float()
        scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        return (wide * scale).to(x.dtype).mul_(weight)
