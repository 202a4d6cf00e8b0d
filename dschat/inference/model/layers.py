"""The weights of a layer, collected once per version, so that steps do not look them up by name.

Shapes: T tokens, E hidden size, H heads, D head size.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dschat.distributed import RankGroup
from dschat.inference.model.borrowed import HeadLayout
from dschat.inference.model.experts import Experts
from dschat.inference.model.positions import Rotary
from dschat.inference.model.spec import LatentSpec
from dschat.inference.model.states import Carried
from dschat.inference.model.weights import AnyLinear, Weights
from dschat.models.packing.kernels import Scores
from dschat.models.packing.states import StatefulRows, read_by_row

Product = Callable[[AnyLinear, Tensor], Tensor]


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

    def heads(self, norms: tuple[Norm, Norm], parts: list[Tensor], group: RankGroup | None) -> None:
        """Normalize queries and keys, in place: each head, or all heads of a token, on all ranks
        of ``group``, together.
        """
        if group is None:
            for norm, part in zip(norms, parts, strict=True):
                part.copy_(self(norm, part))
            return
        squares = torch.stack([part.float().square().sum((1, 2)) for part in parts])  # (2, T)
        squares = group.all_reduce_sum(squares)
        for norm, part, total in zip(norms, parts, squares, strict=True):
            count = part.shape[1] * part.shape[2] * group.size
            scale = total.div_(count).add_(self._eps).rsqrt_().view(-1, 1, 1)
            part.copy_((part.float() * scale).mul_(norm.scale.view(part.shape[1:])))


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
        if spec is None or f"{name}.kv_b" not in linears:
            return None
        q_norm, kv_norm = (Norm.of(weights, f"{name}.{kind}_a_norm") for kind in ("q", "kv"))
        assert kv_norm is not None
        of_keys = linears[f"{name}.kv_a"], kv_norm, linears[f"{name}.kv_b"]
        return cls(spec, linears.get(f"{name}.q_a"), q_norm, linears[f"{name}.q_b"], *of_keys)

    def heads(
        self,
        x: Tensor,
        size: int,
        product: Product,
        norm: Callable[..., Tensor],
        rotate: Callable[[Tensor], None] | None,
    ) -> Tensor:
        """The layer's input (T, E) -> heads of queries, keys and values (T, 3 H, D = ``size``);
        heads of values end in zeros. ``norm``: of a `Norm`, an input, what reads it, and eps;
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


class Mixer:
    """The part of layer ``i`` that carries states, as transformers wrote it: its linear layers run
    as our products. A tensor-parallel rank has it whole.
    """

    def __init__(self, weights: Weights, i: int) -> None:
        self._spec = spec = weights.spec.mixers[i]
        kept = {id(p): p for p in spec.module.parameters()}  # until they are replaced
        self._module = module = copy.deepcopy(spec.module, kept)
        for path, p in list(module.named_parameters()):
            target = f"layers.{i}.{spec.target(path)}"
            owner_name, _, name = path.rpartition(".")
            owner = module.get_submodule(owner_name)
            if owner_name in spec.linears:
                owner.forward = partial(self._run, weights.linears[target.rpartition(".")[0]])
                value = torch.empty((), dtype=weights.dtype, device=weights.device).expand(p.shape)
            else:
                value = weights.tensors[target]
            owner._parameters[name] = nn.Parameter(value, requires_grad=False)
        read_by_row(module)

    def _run(self, linear: AnyLinear, x: Tensor) -> Tensor:
        return self._product(linear, x.flatten(0, -2)).view(*x.shape[:-1], -1)

    def __call__(self, x: Tensor, carried: Carried | StatefulRows, product: Product) -> Tensor:
        """(T, E) -> (T, E), from the states in ``carried``, which it changes."""
        self._product = product  # of this step
        rows = carried.num_sequences if isinstance(carried, Carried) else 1
        output = self._spec(x.view(rows, -1, x.shape[1]), carried.cache, self._module)
        return output.reshape(x.shape)


def split_gates(heads: Tensor, layout: HeadLayout) -> tuple[Tensor, Tensor]:
    """Queries, keys and values, and the gates that follow each query, of heads (T, 2 H + 2 K, D):
    (T, (H + 2 K) * D) and (T, H * D).
    """
    queries, gates = heads[:, layout.q].unflatten(1, (-1, 2)).unbind(2)
    heads = torch.cat([queries, heads[:, layout.k], heads[:, layout.v]], 1)
    return heads.flatten(1), gates.flatten(1)


class Layer(NamedTuple):
    place: int  # of its keys and values among those of all layers
    norm1: Norm | None
    out_norm: Norm | None
    norm2: Norm | None
    down_norm: Norm | None
    qk_norms: tuple[Norm, Norm] | None
    qkv: AnyLinear | None  # None: `latent`
    latent: Latent | None
    gate: AnyLinear | None
    gated: HeadLayout | None  # of the output of `qkv`, where gates are among queries
    out: AnyLinear | None  # None: no attention
    mixer: Mixer | None
    mlp: Mlp | Experts
    shared: Mlp | None  # beside experts
    shared_gate: AnyLinear | None  # its sigmoid multiplies what `shared` returns
    layout: HeadLayout  # of the output of `qkv`, without gates
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
        heads, gated = (weights.num_heads, weights.num_kv_heads), None
        if spec.gate is not None and spec.gate.in_queries:
            gated = HeadLayout.of(2 * heads[0], heads[1], order or "qkv")
            order = ()
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
            place=spec.place(i),
            **norms,
            qk_norms=(q_norm, k_norm) if q_norm and k_norm else None,
            qkv=qkv,
            latent=Latent.of(weights, name),
            gate=linears.get(f"{name}.gate"),
            gated=gated,
            out=linears.get(f"{name}.out"),
            mixer=Mixer(weights, i) if i in spec.mixers else None,
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
