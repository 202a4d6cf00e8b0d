"""The weights of a layer, collected once per version, so that steps do not look them up by name.

Shapes: T tokens, E hidden size, H heads, D head size.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dschat.inference.model.borrowed import HeadLayout
from dschat.inference.model.experts import Experts
from dschat.inference.model.positions import Rotary
from dschat.inference.model.spec import LatentSpec
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
        return cls(weight, bias, weights.spec.norm_offset)

    @property
    def scale(self) -> Tensor:
        return self.weight.float() + self.offset if self.offset else self.weight


class Norms:
    """Computes norms by torch's operators. ``eps``: where none is given."""

    def __init__(self, eps: float) -> None:
        self._eps = eps
        self._constants: dict[float, Tensor] = {}

    def __call__(self, norm: Norm, x: Tensor, eps: float | None = None) -> Tensor:
        weight, eps = norm.scale, self._eps if eps is None else eps
        if norm.bias is not None:
            return F.layer_norm(x, weight.shape, weight, norm.bias, eps)
        if weight.dtype != x.dtype:
            return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
        if x.is_cuda or x.dtype != torch.float32:
            return F.rms_norm(x, weight.shape, weight, eps)
        # x / sqrt(mean(x^2) + eps): takes less than half the time of F.rms_norm on a CPU.
        # Constants are tensors: a Python number would be converted in every call.
        norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        norms.mul_(self._constant(weight.shape[0] ** -0.5)).hypot_(self._constant(eps**0.5))
        return x.div(norms).mul_(weight)

    def _constant(self, value: float) -> Tensor:
        if value not in self._constants:
            self._constants[value] = torch.tensor(value)
        return self._constants[value]


class Mlp(NamedTuple):
    up: AnyLinear
    down: AnyLinear

    @property
    def is_gate_first(self) -> bool:
        """In the output of `up`."""
        return self.up.order != ("up", "gate")


class Latent(NamedTuple):
    """See `LatentSpec`."""

    spec: LatentSpec
    q_a: AnyLinear | None
    q_norm: Norm | None
    q_b: AnyLinear
    kv_a: AnyLinear
    kv_norm: Norm
    kv_b: AnyLinear

    @classmethod
    def of(cls, weights: Weights, name: str) -> "Latent | None":
        spec, linears = weights.spec.latent, weights.linears
        if spec is None:
            return None
        q_norm, kv_norm = (Norm.of(weights, f"{name}.{kind}_a_norm") for kind in ("q", "kv"))
        assert kv_norm is not None
        of_keys = linears[f"{name}.kv_a"], kv_norm, linears[f"{name}.kv_b"]
        return cls(spec, linears.get(f"{name}.q_a"), q_norm, linears[f"{name}.q_b"], *of_keys)

    def heads(
        self,
        x: Tensor,
        size: int,
        product: Callable[[AnyLinear, Tensor], Tensor],
        norm: Callable[..., Tensor],
        rotate: Callable[[Tensor], None] | None,
    ) -> Tensor:
        """The layer's input (T, E) -> heads of queries, keys and values (T, 3 H, D = ``size``);
        those of values end in zeros. ``norm``: of a `Norm`, an input, what reads it, and eps;
        ``rotate``: heads (T, H, D'), in place.
        """
        rank, plain, queries = self.spec.rank, size - self.spec.rotated, x
        if self.q_a is not None:
            queries = norm(self.q_norm, product(self.q_a, x), self.q_b, self.spec.eps)
        compressed = product(self.kv_a, x)
        turned = compressed[:, None, rank:]
        latent = norm(self.kv_norm, compressed[:, :rank].contiguous(), self.kv_b, self.spec.eps)
        queries = product(self.q_b, queries).unflatten(1, (-1, size))
        pairs = product(self.kv_b, latent).unflatten(1, (queries.shape[1], -1))
        if rotate is not None:
            rotate(queries[..., plain:])
            rotate(turned)
        heads = x.new_zeros(len(x), 3, *queries.shape[1:])
        q, k, v = heads.unbind(1)
        q.copy_(queries)
        k[..., :plain] = pairs[..., :plain]
        k[..., plain:] = turned
        v[..., : self.spec.value_size] = pairs[..., plain:]
        return heads.flatten(1, 2)

    def values(self, attended: Tensor, size: int) -> Tensor:
        """Attention's output (T, H * D = ``size``) without the zeros: (T, H * value size)."""
        if size == self.spec.value_size:
            return attended
        return attended.unflatten(1, (-1, size))[..., : self.spec.value_size].flatten(1)


class Layer(NamedTuple):
    norm1: Norm | None
    out_norm: Norm | None
    norm2: Norm | None
    down_norm: Norm | None
    qk_norms: tuple[Norm, Norm] | None
    qkv: AnyLinear | None  # None: `latent`
    latent: Latent | None
    out: AnyLinear
    mlp: Mlp | Experts
    shared: Mlp | None  # beside experts
    shared_gate: AnyLinear | None  # its sigmoid multiplies what `shared` returns
    layout: HeadLayout  # of the output of `qkv`
    rotary: Rotary | None
    scores: Scores

    @classmethod
    def of(cls, weights: Weights, i: int, rotary: Rotary | None) -> "Layer":
        spec, name = weights.spec, f"layers.{i}"
        linears, tensors = weights.linears, weights.tensors
        norms = {
            kind: Norm.of(weights, f"{name}.{kind}")
            for kind in ("norm1", "out_norm", "norm2", "down_norm", "q_norm", "k_norm")
        }
        q_norm, k_norm = norms.pop("q_norm"), norms.pop("k_norm")
        qkv = linears.get(f"{name}.qkv")
        order, interleaved = (qkv.order, qkv.interleaved) if qkv is not None else ((), False)
        heads = weights.num_heads, weights.num_kv_heads
        mlp: Mlp | Experts
        shared = None
        if f"{name}.shared_up" in linears:
            shared = Mlp(linears[f"{name}.shared_up"], linears[f"{name}.shared_down"])
        if spec.experts is not None and f"{name}.router" in linears:
            mlp = Experts.of(spec.experts, linears, tensors, name)
        else:
            mlp = Mlp(linears[f"{name}.up"], linears[f"{name}.down"])
        how = spec.attention_scale(i), spec.window(i), spec.attention_softcap
        return cls(
            **norms,
            qk_norms=(q_norm, k_norm) if q_norm and k_norm else None,
            qkv=qkv,
            latent=Latent.of(weights, name),
            out=linears[f"{name}.out"],
            mlp=mlp,
            shared=shared,
            shared_gate=linears.get(f"{name}.shared_gate"),
            layout=HeadLayout.of(*heads, order or "qkv", interleaved),
            rotary=rotary,
            scores=Scores(*how, tensors.get(f"{name}.sinks.weight")),
        )

    @property
    def up(self) -> AnyLinear | None:
        """What reads the MLP's input; None: experts that the router chooses."""
        return None if isinstance(self.mlp, Experts) else self.mlp.up

    @property
    def is_in_order(self) -> bool:
        """Whether queries, keys, values and gate, up stand as the CPU kernels read them."""
        dense = self.shared if isinstance(self.mlp, Experts) else self.mlp
        return self.layout.in_order and (dense is None or dense.is_gate_first)
