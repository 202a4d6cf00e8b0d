"""Collects the weights of a layer, once per version, so that steps do not look them up by name."""

from typing import NamedTuple

import torch
from torch import Tensor

from dschat.inference.model.borrowed import HeadLayout
from dschat.inference.model.experts import Experts
from dschat.inference.model.rotary import Rotary
from dschat.inference.model.weights import AnyLinear, Weights
from dschat.models.packing.kernels import Scores


class Norm(NamedTuple):
    weight: Tensor
    bias: Tensor | None  # None: RMS norm
    offset: float = 0.0  # of the weight

    @classmethod
    def of(cls, weights: Weights, name: str) -> "Norm | None":
        weight = weights.tensors.get(f"{name}.weight")
        if weight is None:
            return None
        assert weight.is_contiguous()
        bias = weights.tensors.get(f"{name}.bias")
        if bias is None and weights.spec.norm == "layernorm":
            bias = torch.zeros_like(weight)
        return cls(weight, bias, weights.norm_offset)

    @property
    def scale(self) -> Tensor:
        return self.weight.float() + self.offset if self.offset else self.weight


class Mlp(NamedTuple):
    up: AnyLinear
    down: AnyLinear

    @property
    def is_gate_first(self) -> bool:
        """In the output of `up`."""
        return self.up.order != ("up", "gate")


class Layer(NamedTuple):
    norm1: Norm | None
    out_norm: Norm | None
    norm2: Norm | None
    down_norm: Norm | None
    qk_norms: tuple[Norm, Norm] | None
    qkv: AnyLinear
    out: AnyLinear
    mlp: Mlp | Experts
    layout: HeadLayout  # of the output of `qkv`
    rotary: Rotary | None
    scores: Scores | None  # None: as the spec says

    @classmethod
    def of(cls, weights: Weights, i: int, rotary: Rotary | None) -> "Layer":
        spec, name = weights.spec, f"layers.{i}"
        linears, tensors = weights.linears, weights.tensors
        norms = {
            kind: Norm.of(weights, f"{name}.{kind}")
            for kind in ("norm1", "out_norm", "norm2", "down_norm", "q_norm", "k_norm")
        }
        q_norm, k_norm = norms.pop("q_norm"), norms.pop("k_norm")
        qkv = linears[f"{name}.qkv"]
        heads = weights.num_heads, weights.num_kv_heads
        mlp: Mlp | Experts
        if spec.experts is not None and f"{name}.router" in linears:
            mlp = Experts.of(spec.experts, linears, tensors, name)
        else:
            mlp = Mlp(linears[f"{name}.up"], linears[f"{name}.down"])
        sinks, scores = tensors.get(f"{name}.sinks.weight"), None
        if sinks is not None or spec.attention_softcap is not None:
            scores = Scores(spec.attention_scale(i), spec.window(i), spec.attention_softcap, sinks)
        return cls(
            **norms,
            qk_norms=(q_norm, k_norm) if q_norm and k_norm else None,
            qkv=qkv,
            out=linears[f"{name}.out"],
            mlp=mlp,
            layout=HeadLayout.of(*heads, qkv.order or "qkv", qkv.interleaved),
            rotary=rotary,
            scores=scores,
        )

    @property
    def up(self) -> AnyLinear | None:
        """What reads the MLP's input; None: experts that the router chooses."""
        return None if isinstance(self.mlp, Experts) else self.mlp.up

    @property
    def is_in_order(self) -> bool:
        """Whether queries, keys, values and gate, up stand as the CPU kernels read them."""
        return self.layout.in_order and (isinstance(self.mlp, Experts) or self.mlp.is_gate_first)
