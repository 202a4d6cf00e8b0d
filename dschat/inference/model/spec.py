"""Describes a model's architecture to the decoder, as data, and where its weights come from."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from dschat.config import UserError
from dschat.inference.model.states import StateShape


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


@dataclass(frozen=True)
class ExpertSpec:
    """A mixture of experts: an MLP of which each token runs a few, chosen by a router."""

    count: int
    per_token: int
    size: int  # intermediate size of one
    renormalized: bool = True  # the shares of a token's experts add up to 1
    # (a, limit): (up + 1) * gate * sigmoid(a * gate), gate and up cut to the limit (gpt-oss)
    clamped: tuple[float, float] | None = None


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
    norm: str = "layernorm"  # or rmsnorm
    norm_eps: float = 1e-5
    norm_offset: float = 0.0  # norms multiply by this + their weight
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
    # per layer: its entry of the config's rope_parameters ("": they are of all layers), or None:
    # a layer without positions; (): "" in all
    ropes: tuple[str | None, ...] = ()
    # (b, n): queries grow by 1 + b * log(1 + floor(position / n))
    query_growth: tuple[float, int] | None = None
    whole_qk_norm: bool = False  # query and key norms are of all heads together, not of each
    alibi: bool = False
    windows: tuple[int | None, ...] = ()  # per layer: keys that a query attends to; (): all
    states: tuple[StateShape, ...] = ()  # of layers without keys and values
    attention_scales: tuple[float, ...] = ()  # per layer; (): head_size ** -0.5
    attention_softcap: float | None = None  # c: scores are c * tanh(score / c)
    has_other_scores: bool = False  # a module's layers have softcaps, sinks or chunks
    tied: bool = False
    logits_scale: float = 1.0
    logits_softcap: float | None = None

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
    def embedding_size(self) -> int:
        return self.embed_size or self.hidden_size

    @property
    def has_sinks(self) -> bool:
        """Whether attention has a further score per head, whose value is zero."""
        return any(".sinks." in source.target for source in self.sources)

    @property
    def has_plain_attention(self) -> bool:
        """Whether a kernel that knows windows, scales, norms of heads, one rotation of halves,
        ALiBi and heads of up to 256 computes the attention of all layers.
        """
        others = (self.attention_softcap, self.has_sinks, self.query_growth, self.norm_offset)
        more = (self.has_other_scores, self.head_size > 256, self.interleaved_rotary, self.ropes)
        return not any((*others, *more, self.whole_qk_norm))

    def token_bytes(self, num_ranks: int, itemsize: int) -> int:
        """Bytes of a token's keys and values in all layers, on one of ``num_ranks``."""
        return 2 * self.num_layers * (self.num_kv_heads // num_ranks) * self.head_size * itemsize

    def layer_sources(self) -> Iterator[WeightSource]:
        """Every source; those of layers once per layer."""
        for s in self.sources:
            if "{i}" in s.name:
                yield from (s.of_layer(i) for i in range(self.num_layers))
            else:
                yield s


def check_shares(spec: ModelSpec, size: int) -> None:
    """Raise ``UserError`` unless ``size`` ranks can share the heads and the MLP evenly."""
    experts = [] if spec.experts is None else [("expert columns", spec.experts.size)]
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


# -- weight sources --------------------------------------------------------------------------------


def both(
    name: str,
    target: str,
    bias: bool = True,
    part: str = "",
    transposed: bool = False,
    interleaved: bool = False,
) -> list[WeightSource]:
    """The weight of a linear layer or norm, and its bias if it has one."""
    suffixes = ("weight", "bias") if bias else ("weight",)
    return [
        WeightSource(f"{name}.{s}", f"{target}.{s}", part, transposed, interleaved)
        for s in suffixes
    ]


def embeddings(name: str, tied: bool) -> list[WeightSource]:
    weight = f"{name}.weight"
    head = weight if tied else "lm_head.weight"
    return [WeightSource(weight, "embed.weight"), WeightSource(head, "head.weight")]


def separate_qkv(module: str, bias: bool) -> list[WeightSource]:
    return [
        source
        for part in "qkv"
        for source in both(f"{module}.{part}_proj", "layers.{i}.qkv", bias, part=part)
    ]


def gated_mlp(module: str, bias: bool = False) -> list[WeightSource]:
    sources = both(f"{module}.down_proj", "layers.{i}.down", bias)
    for part in ("gate", "up"):
        sources += both(f"{module}.{part}_proj", "layers.{i}.up", bias, part=part)
    return sources


def stacked_experts(
    module: str,
    count: int,
    names: Sequence[str] = (),
    bias: bool = False,
    transposed: bool = False,
    interleaved: bool = False,
) -> list[WeightSource]:
    """Experts in the tensors ``module``.gate_up_proj and down_proj, which have all of them.

    ``names``: in place of these, published checkpoints have gate, up and down of each expert, named
    with ``{e}`` for its number.
    """
    sources = []
    for e in range(count):
        for tensor, kind in (("gate_up_proj", "up"), ("down_proj", "down")):
            target, alternates = f"layers.{{i}}.experts.{kind}.{e}", interleaved and kind == "up"
            name = f"{module}.{tensor}"
            weight = WeightSource(name, f"{target}.weight", "", transposed, alternates, e)
            sources.append(weight)
            if bias:
                of_all = replace(weight, name=f"{name}_bias", target=f"{target}.bias")
                sources.append(replace(of_all, transposed=False))
            for published, part in zip(names, ("gate", "up", ""), strict=False):
                if (kind == "down") == (part == ""):
                    one = f"{published.replace('{e}', str(e))}.weight"
                    sources.append(WeightSource(one, weight.target, part, instead=name))
    return sources
