"""Describes a model's architecture to the decoder, as data: where its weights come from, and which
part of each a tensor-parallel rank holds, in which rows.

Rows of qkv, up, embedding and head are shared out, columns of out and down; of norms and sinks what
belongs to the rank's heads.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dschat.config import UserError
from dschat.inference.model.states import MixerSpec, StateShape


class UnsupportedModel(UserError):
    """The decoder cannot run this model; the message says why."""


@dataclass(frozen=True)
class WeightSource:
    """A checkpoint tensor and the decoder weight that it fills. ``{i}`` in both names is the layer.

    ``target`` ends in ``.weight`` or ``.bias``. ``part`` names the rows of a fused target that the
    tensor fills: q, k, v, gate or up; "" for all of them. Checkpoint matrices are (out, in), or
    (in, out) if ``transposed``. In an ``interleaved`` matrix q, k and v of the first head precede
    those of the second, and so on; or rows of gate and up alternate. ``index``: of a tensor that
    holds all experts, one after another. ``instead``: the tensor in whose place some checkpoints
    have this one.
    """

    name: str
    target: str
    part: str = ""
    transposed: bool = False
    interleaved: bool = False
    index: int | None = None
    instead: str = ""

    def of_layer(self, i: int) -> "WeightSource":
        names = (x.replace("{i}", str(i)) for x in (self.name, self.target, self.instead))
        name, target, instead = names
        return replace(self, name=name, target=target, instead=instead)


Scoring = Literal["softmax", "sigmoid"]


@dataclass(frozen=True)
class ExpertSpec:
    """A mixture of experts: an MLP of which each token runs a few, chosen by a router."""

    count: int
    per_token: int
    size: int  # intermediate size of one
    renormalized: bool = True  # the shares of a token's experts add up to 1
    scoring: Scoring = "softmax"  # of the router's logits
    corrected: tuple[int, ...] = ()  # shape of weights that are added to scores to choose experts
    groups: tuple[int, int] | None = None  # of experts, and how many of them a token reads
    scale: float = 1.0  # of the shares
    least: float = 0.0  # added to their sum, by which they are divided
    precise: bool = False  # the router computes in fp32
    shared: int = 0  # intermediate size of an MLP beside the experts; 0: none
    # (a, limit): (up + 1) * gate * sigmoid(a * gate), gate and up cut to the limit (gpt-oss)
    clamped: tuple[float, float] | None = None

    @property
    def is_usual(self) -> bool:
        """Whether the shares are a softmax of the largest logits."""
        is_plain = self.scoring == "softmax" and self.groups is None and self.scale == 1.0
        return is_plain and not (self.corrected or self.precise or self.least)


@dataclass(frozen=True)
class LatentSpec:
    """Keys and values from a latent of few elements (DeepSeek-V2, arXiv 2405.04434): `head_size` is
    the size of queries and keys. Their last elements are rotated; in keys all heads share these.
    """

    rank: int  # elements of the latent of keys and values
    query_rank: int  # elements of the queries' latent; 0: they come from the layer's input
    rotated: int
    value_size: int  # of a head
    eps: float  # of the latents' RMS norms


class GateSpec(NamedTuple):
    """What attention returns is multiplied by an activation of a linear layer's output."""

    activation: str  # a key of `GATES`
    size: int  # outputs of a head: 1, or one for each of its elements
    in_queries: bool  # they follow each head's query, of the same layer


GATES: dict[str, Callable[[Tensor], Tensor]] = {"sigmoid": torch.sigmoid, "softplus": F.softplus}


@dataclass(frozen=True)
class ModelSpec:
    """A model's architecture for the decoder. Sizes are of the whole model, before sharding.

    Which norms a layer has follows from ``sources``: norm1 and norm2 before attention and MLP,
    out_norm and down_norm of what these add.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    vocab_size: int
    sources: tuple[WeightSource, ...]
    prefix: str  # of the base model, in checkpoint names
    activation: str
    reads_published: bool = True  # else ``sources`` are those of transformers' module alone
    norm: str = "layernorm"  # or rmsnorm
    norm_eps: float = 1e-5
    norm_offset: float = 0.0  # norms multiply by this + their weight
    bare_norms: frozenset[str] = frozenset()  # those that have no weight, such as layers.0.norm1
    embed_size: int = 0  # of the token embedding; 0: hidden_size
    embed_scale: float = 1.0
    gated: bool = False  # MLP: down(act(gate(x)) * up(x))
    experts: ExpertSpec | None = None  # of the layers with a router
    pre_norm: bool = True  # False: norms follow the residual sums (OPT-350M)
    parallel_residual: bool = False  # attention and MLP read the same hidden state
    residual_after_norm: bool = False  # the residual is the norm's output (some BLOOMs)
    residual_scale: float = 1.0  # of what attention and MLP add
    position_offset: int = 0  # learned positions start at this row
    num_positions: int = 0  # rows of the learned position table; 0: no such table
    max_positions: int | None = None  # longest sequence; None: unbounded
    rotary: bool = False
    partial_rotary: bool = False  # the family reads ``partial_rotary_factor``; others rotate all
    interleaved_rotary: bool = False  # rotates adjacent elements; others the halves of a head
    backward_rotary: bool = False  # by the negative angles
    # per layer: its entry of the config's rope_parameters ("": they are of all layers), or None:
    # a layer without positions; (): "" in all
    ropes: tuple[str | None, ...] = ()
    # (b, n): queries grow by 1 + b * log(1 + floor(position / n))
    query_growth: tuple[float, int] | None = None
    latent: LatentSpec | None = None  # else keys and values come from the layer's input
    gate: GateSpec | None = None
    rotates_first: bool = False  # queries and keys are rotated before their norms
    heads_apart: bool = False  # operators of their own make queries and keys, not kernels
    whole_qk_norm: bool = False  # query and key norms are of all heads together, not of each
    alibi: bool = False
    windows: tuple[int | None, ...] = ()  # per layer: keys that a query attends to; (): all
    states: tuple[StateShape, ...] = ()  # of layers without keys and values
    mixers: Mapping[int, MixerSpec] = field(default_factory=dict)  # by layer
    attention_scales: tuple[float, ...] = ()  # per layer; (): head_size ** -0.5
    attention_softcap: float | None = None  # c: scores are c * tanh(score / c)
    tied: bool = False
    logits_scale: float = 1.0
    logits_softcap: float | None = None

    def in_dtype(self, dtype: torch.dtype) -> "ModelSpec":
        """With the states of a model in ``dtype``; so far they are of a model in 16 bits."""
        own = {torch.bfloat16: dtype}
        states = tuple(s._replace(dtype=own.get(s.dtype, s.dtype)) for s in self.states)
        return replace(self, states=states)

    @property
    def num_attending(self) -> int:
        """Layers that have attention."""
        return self.place(self.num_layers)

    def place(self, layer: int) -> int:
        """Of its keys and values: layers before it that have attention."""
        return layer - sum(n < layer for n in self.mixers)

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def attention_scale(self, layer: int) -> float:
        return self.attention_scales[layer] if self.attention_scales else self.head_size**-0.5

    def rope(self, layer: int) -> str | None:
        """The layer's entry of `ropes`; None: no rotary positions."""
        if not self.rotary:
            return None
        return self.ropes[layer] if self.ropes else ""

    @property
    def rotary_size(self) -> int:
        """Elements of a head, of which all or a part are rotated."""
        return self.latent.rotated if self.latent else self.head_size

    @property
    def embedding_size(self) -> int:
        return self.embed_size or self.hidden_size

    def token_bytes(self, num_ranks: int, itemsize: int) -> int:
        """Bytes of a token's keys and values in all layers, on one of ``num_ranks``."""
        heads = 2 * self.num_attending * (self.num_kv_heads // num_ranks)
        return heads * self.head_size * itemsize

    def layer_sources(self) -> Iterator[WeightSource]:
        """Every source; of a layer's weights, one per layer."""
        for s in self.sources:
            if "{i}" in s.name:
                yield from (s.of_layer(i) for i in range(self.num_layers))
            else:
                yield s


def check_shares(spec: ModelSpec, size: int) -> None:
    """Raise ``UserError`` unless ``size`` ranks can share the heads and the MLP evenly."""
    experts = []
    if spec.experts is not None:
        experts = [("expert columns", spec.experts.size)]
        experts += [("columns beside experts", spec.experts.shared)]
    for unit, count in (
        ("attention heads", spec.num_heads),
        ("key-value heads", spec.num_kv_heads),
        ("MLP columns", spec.intermediate_size),
        *experts,
    ):
        if count % size:
            raise UserError(
                f"--inference_tp_size {size} does not divide the model's {count} {unit}"
            )


_LINEAR = frozenset(
    ("qkv", "gate", "out", "up", "down", "router", "head", "project_in", "project_out")
    + ("product", "shared_up", "shared_down", "shared_gate", "q_a", "q_b", "kv_a", "kv_b")
)


class Share:
    """The share of ``rank`` among ``size`` ranks."""

    def __init__(self, spec: ModelSpec, rank: int, size: int) -> None:
        self.spec, self.rank, self.size = spec, rank, size

    def _inner_size(self, base: str, num_ranks: int) -> int:
        """Intermediate size of the MLP or expert that ``base`` is of, on one of ``num_ranks``."""
        experts = self.spec.experts
        size = experts.size if experts and is_expert(base) else self.spec.intermediate_size
        if experts and kind_of(base) in ("shared_up", "shared_down"):
            size = experts.shared
        return size // num_ranks

    def _part_rows(self, base: str, num_ranks: int) -> dict[str, int]:
        """Rows of each part of a fused matrix, in order, on one of ``num_ranks``; {}: not fused."""
        spec, kind = self.spec, kind_of(base)
        if kind in ("up", "shared_up"):
            parts = ("gate", "up") if spec.gated else ("",)
            return dict.fromkeys(parts, self._inner_size(base, num_ranks))
        heads = {"q": spec.num_heads, "k": spec.num_kv_heads, "v": spec.num_kv_heads}
        rows = {part: count // num_ranks * spec.head_size for part, count in heads.items()}
        if spec.gate is not None and spec.gate.in_queries:
            rows["q"] *= 2
        return rows if kind == "qkv" else {}

    def _shape(self, base: str, num_ranks: int) -> tuple[int, ...]:
        """Of a weight on one of ``num_ranks``; of linear layers, (out, in)."""
        spec, size = self.spec, self.spec.hidden_size
        fused = sum(self._part_rows(base, num_ranks).values())
        heads, kv_heads = spec.num_heads // num_ranks, spec.num_kv_heads // num_ranks
        normed = (heads, kv_heads) if spec.whole_qk_norm else (1, 1)
        vocab = -(-spec.vocab_size // num_ranks)  # the last rank's may be padding
        if kind_of(base) in ("mixer", "product"):
            _, layer, name = base.split(".", 2)
            return spec.mixers[int(layer)].shapes[f"{name}.weight"]
        if spec.latent is not None and (shape := _latent_shape(spec, kind_of(base), heads)):
            return shape
        return {
            "embed": (vocab, spec.embedding_size),
            "positions": (spec.num_positions, size),
            "q_norm": (normed[0] * spec.head_size,),
            "k_norm": (normed[1] * spec.head_size,),
            "sinks": (heads,),
            "qkv": (fused, size),
            "gate": (heads * spec.gate.size if spec.gate else 0, size),
            "out": (size, heads * spec.head_size),
            "up": (fused, size),
            "down": (size, self._inner_size(base, num_ranks)),
            "shared_up": (fused, size),
            "shared_down": (size, self._inner_size(base, num_ranks)),
            "shared_gate": (1, size),
            "router": (spec.experts.count if spec.experts else 0, size),
            "correction": spec.experts.corrected if spec.experts else (),
            "head": (vocab, spec.embedding_size),
            "project_in": (size, spec.embedding_size),
            "project_out": (spec.embedding_size, size),
        }.get(kind_of(base), (size,))

    def shape(self, base: str) -> tuple[int, ...]:
        """Of this rank's share."""
        return self._shape(base, self.size)

    def linear_shape(self, base: str) -> tuple[int, int] | None:
        """(out, in) of this rank's share; None if ``base`` is not a linear layer."""
        if kind_of(base) not in _LINEAR:
            return None
        rows, columns = self.shape(base)
        return rows, columns

    def full_shape(self, source: WeightSource) -> tuple[int, ...]:
        """Shape of the whole tensor, as the checkpoint stores it."""
        base, _, suffix = source.target.rpartition(".")
        shape, experts = self._shape(base, 1), self.spec.experts
        if kind_of(base) in _LINEAR:
            rows = self._part_rows(base, 1).get(source.part, shape[0])
            shape = (rows,) if suffix == "bias" else (rows, shape[1])
        shape = shape[::-1] if source.transposed else shape
        return (experts.count, *shape) if experts and source.index is not None else shape

    def _rank_slice(self, rows: Tensor, count: int) -> Tensor:
        return rows[self.rank * count : (self.rank + 1) * count]

    def local_rows(self, source: WeightSource, full: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yields (first row in the target, rows): this rank's share of the rows of ``full``."""
        base, first = source.target.rpartition(".")[0], 0
        kind, fused = kind_of(base), self._part_rows(base, self.size)
        if not fused:
            count = self.shape(base)[0]
            yield 0, self._rank_slice(full, count) if full.shape[0] > count else full
        elif source.part:
            pieces = {source.part: full}
        elif source.interleaved:
            of_each = self.spec.head_size if kind == "qkv" else 1
            alternating = full.unflatten(0, (-1, len(fused), of_each)).unbind(1)
            pieces = {p: x.flatten(0, 1) for p, x in zip(fused, alternating, strict=True)}
        else:
            pieces = dict(zip(fused, full.split([*self._part_rows(base, 1).values()]), strict=True))
        for part, count in fused.items():
            if part in pieces:
                yield first, self._rank_slice(pieces[part], count)
            first += count

    def factors(self, source: WeightSource, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """LoRA's factors A (r, in) and B (out, r) of an expert, as PEFT has them of all."""
        if source.index is None or self.spec.experts is None:
            return a, b
        count, i = self.spec.experts.count, source.index
        return a.unflatten(0, (count, -1))[i], b.unflatten(1, (-1, count))[..., i]

    def local_columns(self, source: WeightSource, matrix: Tensor) -> Tensor:
        """``matrix`` (rows, in) of a linear layer cut to this rank's inputs."""
        count = self.shape(source.target.rpartition(".")[0])[1]
        return matrix if matrix.shape[1] == count else self._rank_slice(matrix.T, count).T


def _latent_shape(spec: ModelSpec, kind: str, heads: int) -> tuple[int, ...] | None:
    """Of a weight between the hidden states and ``heads`` heads; None: of others."""
    latent = spec.latent
    assert latent is not None
    of_head = spec.head_size - latent.rotated + latent.value_size
    return {
        "q_a": (latent.query_rank, spec.hidden_size),
        "q_a_norm": (latent.query_rank,),
        "q_b": (heads * spec.head_size, latent.query_rank or spec.hidden_size),
        "kv_a": (latent.rank + latent.rotated, spec.hidden_size),
        "kv_a_norm": (latent.rank,),
        "kv_b": (heads * of_head, latent.rank),
        "out": (spec.hidden_size, heads * latent.value_size),
    }.get(kind)


def is_expert(base: str) -> bool:
    return base.rpartition(".")[2].isdigit()


def kind_of(base: str) -> str:
    """What a weight is: qkv, norm1, ...; an expert's is up or down, a mixer's mixer or product."""
    *_, kind, name = ("", *base.split("."))
    return kind if name.isdigit() or kind in ("mixer", "product") else name
