"""Architecture table: describes each supported model family to the decoder, as data.

`model_spec` maps a transformers config to a `ModelSpec`: sizes, norms, positions, activation, and
the decoder weight that each checkpoint tensor fills. A new family is a new row of `ARCHITECTURES`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypedDict

from transformers import PretrainedConfig
from transformers.activations import ACT2FN

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
    those of the second, and so on.
    """

    name: str
    target: str
    part: str = ""
    transposed: bool = False
    interleaved: bool = False


@dataclass(frozen=True)
class ModelSpec:
    """A model's architecture for the decoder. Sizes are of the whole model, before sharding."""

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
    embed_size: int = 0  # of the token embedding; 0: hidden_size
    gated: bool = False  # MLP: down(act(gate(x)) * up(x))
    pre_norm: bool = True  # False: norms follow the residual sums (OPT-350M)
    parallel_residual: bool = False  # attention and MLP read the same hidden state
    residual_after_norm: bool = False  # the residual is the norm's output (some BLOOMs)
    position_offset: int = 0  # learned positions start at this row
    num_positions: int = 0  # rows of the learned position table; 0: no such table
    max_positions: int | None = None  # longest sequence; None: unbounded
    rotary: bool = False
    partial_rotary: bool = False  # the family reads ``partial_rotary_factor``; others rotate all
    alibi: bool = False
    windows: tuple[int | None, ...] = ()  # per layer: keys that a query attends to; (): all
    states: tuple[StateShape, ...] = ()  # of layers without keys and values
    attention_scales: tuple[float, ...] = ()  # per layer; (): head_size ** -0.5
    tied: bool = False

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def attention_scale(self, layer: int) -> float:
        return self.attention_scales[layer] if self.attention_scales else self.head_size**-0.5

    @property
    def embedding_size(self) -> int:
        return self.embed_size or self.hidden_size

    def token_bytes(self, num_ranks: int, itemsize: int) -> int:
        """Bytes of a token's keys and values in all layers, on one of ``num_ranks``."""
        return 2 * self.num_layers * (self.num_kv_heads // num_ranks) * self.head_size * itemsize

    def layer_sources(self) -> Iterator[WeightSource]:
        """Every source; those of layers once per layer."""
        for s in self.sources:
            if "{i}" not in s.name:
                yield s
                continue
            for i in range(self.num_layers):
                name, target = s.name.replace("{i}", str(i)), s.target.replace("{i}", str(i))
                yield WeightSource(name, target, s.part, s.transposed, s.interleaved)


Row = Callable[[PretrainedConfig], ModelSpec]

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")


def check_shares(spec: ModelSpec, size: int) -> None:
    """Raise ``UserError`` unless ``size`` ranks can share the heads and the MLP evenly."""
    for unit, count in (
        ("attention heads", spec.num_heads),
        ("key-value heads", spec.num_kv_heads),
        ("MLP columns", spec.intermediate_size),
    ):
        if count % size:
            raise UserError(
                f"--inference_tp_size {size} does not divide the model's {count} {unit}"
            )


def model_spec(config: PretrainedConfig) -> ModelSpec:
    """The spec of a transformers ``config``.

    Raises:
        UnsupportedModel: the family is not in the table, or the config needs a feature that the
            decoder does not have.
    """
    row = ARCHITECTURES.get(config.model_type)
    if row is None:
        known = ", ".join(ARCHITECTURES)
        raise UnsupportedModel(f"{config.model_type} is not in the architecture table ({known})")
    spec = row(config)
    if spec.activation not in ACT2FN:
        raise UnsupportedModel(f"the activation {spec.activation} is not supported")
    if spec.rotary:
        # NOTE: as transformers does when it builds the model: an original_max_position_embeddings
        # beside rope_parameters (Phi-3's way to write LongRoPE) overrides the one inside them.
        config.standardize_rope_params()
        kind = config.rope_parameters["rope_type"]
        if kind not in ROPE_TYPES:
            raise UnsupportedModel(f"rotary positions of the type {kind} are not supported")
    return spec


def _both(
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


def _embeddings(name: str, head: str, tied: bool) -> list[WeightSource]:
    weight = f"{name}.weight"
    head = weight if tied else f"{head}.weight"
    return [WeightSource(weight, "embed.weight"), WeightSource(head, "head.weight")]


class _Sizes(TypedDict):
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    tied: bool


def _sizes(c: PretrainedConfig) -> _Sizes:
    """Config fields shared by the families with as many key-value heads as query heads."""
    return {
        "num_layers": c.num_hidden_layers,
        "hidden_size": c.hidden_size,
        "num_heads": c.num_attention_heads,
        "num_kv_heads": c.num_attention_heads,
        "head_size": c.hidden_size // c.num_attention_heads,
        "vocab_size": c.vocab_size,
        "tied": c.tie_word_embeddings,
    }


def _separate_qkv(module: str, bias: bool) -> list[WeightSource]:
    return [
        source
        for part in "qkv"
        for source in _both(f"{module}.{part}_proj", "layers.{i}.qkv", bias, part=part)
    ]


def _opt(c: PretrainedConfig) -> ModelSpec:
    base, layer = "model.decoder", "model.decoder.layers.{i}"
    affine, bias = c.layer_norm_elementwise_affine, c.enable_bias
    sources = _embeddings(f"{base}.embed_tokens", "lm_head", c.tie_word_embeddings)
    sources += [WeightSource(f"{base}.embed_positions.weight", "positions.weight")]
    if c.word_embed_proj_dim != c.hidden_size:
        sources += _both(f"{base}.project_in", "project_in", bias=False)
        sources += _both(f"{base}.project_out", "project_out", bias=False)
    sources += _separate_qkv(f"{layer}.self_attn", bias)
    sources += _both(f"{layer}.self_attn.out_proj", "layers.{i}.out", bias)
    sources += _both(f"{layer}.fc1", "layers.{i}.up", bias)
    sources += _both(f"{layer}.fc2", "layers.{i}.down", bias)
    if affine:
        sources += _both(f"{layer}.self_attn_layer_norm", "layers.{i}.norm1")
        sources += _both(f"{layer}.final_layer_norm", "layers.{i}.norm2")
    has_final_norm = c.do_layer_norm_before and not c._remove_final_layer_norm
    if has_final_norm and affine:
        sources += _both(f"{base}.final_layer_norm", "final_norm")
    if not affine or (c.do_layer_norm_before and not has_final_norm):
        raise UnsupportedModel("this OPT has layer norms without weights, or no final one")
    return ModelSpec(
        **_sizes(c),
        intermediate_size=c.ffn_dim,
        sources=tuple(sources),
        prefix="model.",
        activation=c.activation_function,
        embed_size=c.word_embed_proj_dim,
        pre_norm=c.do_layer_norm_before,
        position_offset=2,
        num_positions=c.max_position_embeddings + 2,
        max_positions=c.max_position_embeddings,
    )


def _gpt2(c: PretrainedConfig) -> ModelSpec:
    layer = "transformer.h.{i}"
    if c.add_cross_attention:
        raise UnsupportedModel("this GPT-2 has cross-attention")
    sources = _embeddings("transformer.wte", "lm_head", c.tie_word_embeddings)
    sources += [WeightSource("transformer.wpe.weight", "positions.weight")]
    sources += _both(f"{layer}.ln_1", "layers.{i}.norm1")
    sources += _both(f"{layer}.attn.c_attn", "layers.{i}.qkv", transposed=True)
    sources += _both(f"{layer}.attn.c_proj", "layers.{i}.out", transposed=True)
    sources += _both(f"{layer}.ln_2", "layers.{i}.norm2")
    sources += _both(f"{layer}.mlp.c_fc", "layers.{i}.up", transposed=True)
    sources += _both(f"{layer}.mlp.c_proj", "layers.{i}.down", transposed=True)
    sources += _both("transformer.ln_f", "final_norm")
    head_size = c.hidden_size // c.num_attention_heads
    scale = head_size**-0.5 if c.scale_attn_weights else 1.0
    by_layer = c.scale_attn_by_inverse_layer_idx
    scales = tuple(scale / (i + 1 if by_layer else 1) for i in range(c.num_hidden_layers))
    return ModelSpec(
        **_sizes(c),
        intermediate_size=c.n_inner or 4 * c.hidden_size,
        sources=tuple(sources),
        prefix="transformer.",
        activation=c.activation_function,
        norm_eps=c.layer_norm_epsilon,
        num_positions=c.max_position_embeddings,
        max_positions=c.max_position_embeddings,
        attention_scales=scales,
    )


def _gpt_neox(c: PretrainedConfig) -> ModelSpec:
    layer = "gpt_neox.layers.{i}"
    sources = _embeddings("gpt_neox.embed_in", "lm_head", c.tie_word_embeddings)
    sources += _both(f"{layer}.input_layernorm", "layers.{i}.norm1")
    sources += _both(f"{layer}.post_attention_layernorm", "layers.{i}.norm2")
    sources += _both(
        f"{layer}.attention.query_key_value",
        "layers.{i}.qkv",
        c.attention_bias,
        interleaved=True,
    )
    sources += _both(f"{layer}.attention.dense", "layers.{i}.out", c.attention_bias)
    sources += _both(f"{layer}.mlp.dense_h_to_4h", "layers.{i}.up")
    sources += _both(f"{layer}.mlp.dense_4h_to_h", "layers.{i}.down")
    sources += _both("gpt_neox.final_layer_norm", "final_norm")
    return ModelSpec(
        **_sizes(c),
        intermediate_size=c.intermediate_size,
        sources=tuple(sources),
        prefix="gpt_neox.",
        activation=c.hidden_act,
        norm_eps=c.layer_norm_eps,
        parallel_residual=c.use_parallel_residual,
        max_positions=c.max_position_embeddings,
        rotary=True,
        partial_rotary=True,
    )


def _bloom(c: PretrainedConfig) -> ModelSpec:
    layer = "transformer.h.{i}"
    sources = _embeddings("transformer.word_embeddings", "lm_head", c.tie_word_embeddings)
    sources += _both("transformer.word_embeddings_layernorm", "embed_norm")
    sources += _both(f"{layer}.input_layernorm", "layers.{i}.norm1")
    sources += _both(f"{layer}.self_attention.query_key_value", "layers.{i}.qkv", interleaved=True)
    sources += _both(f"{layer}.self_attention.dense", "layers.{i}.out")
    sources += _both(f"{layer}.post_attention_layernorm", "layers.{i}.norm2")
    sources += _both(f"{layer}.mlp.dense_h_to_4h", "layers.{i}.up")
    sources += _both(f"{layer}.mlp.dense_4h_to_h", "layers.{i}.down")
    sources += _both("transformer.ln_f", "final_norm")
    return ModelSpec(
        **_sizes(c),
        intermediate_size=4 * c.hidden_size,
        sources=tuple(sources),
        prefix="transformer.",
        activation="gelu_new",
        norm_eps=c.layer_norm_epsilon,
        residual_after_norm=c.apply_residual_connection_post_layernorm,
        alibi=True,
    )


def _llama_like(
    c: PretrainedConfig,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    windows: tuple[int | None, ...] = (),
) -> ModelSpec:
    layer = "model.layers.{i}"
    sources = _embeddings("model.embed_tokens", "lm_head", c.tie_word_embeddings)
    sources += _both(f"{layer}.input_layernorm", "layers.{i}.norm1", bias=False)
    sources += _separate_qkv(f"{layer}.self_attn", qkv_bias)
    if qk_norm:
        sources += _both(f"{layer}.self_attn.q_norm", "layers.{i}.q_norm", bias=False)
        sources += _both(f"{layer}.self_attn.k_norm", "layers.{i}.k_norm", bias=False)
    sources += _both(f"{layer}.self_attn.o_proj", "layers.{i}.out", out_bias)
    sources += _both(f"{layer}.post_attention_layernorm", "layers.{i}.norm2", bias=False)
    for part in ("gate", "up"):
        sources += _both(f"{layer}.mlp.{part}_proj", "layers.{i}.up", mlp_bias, part=part)
    sources += _both(f"{layer}.mlp.down_proj", "layers.{i}.down", mlp_bias)
    sources += _both("model.norm", "final_norm", bias=False)
    head_size = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    return ModelSpec(
        num_layers=c.num_hidden_layers,
        hidden_size=c.hidden_size,
        num_heads=c.num_attention_heads,
        num_kv_heads=c.num_key_value_heads or c.num_attention_heads,
        head_size=head_size,
        intermediate_size=c.intermediate_size,
        vocab_size=c.vocab_size,
        sources=tuple(sources),
        prefix="model.",
        activation=c.hidden_act,
        norm="rmsnorm",
        norm_eps=c.rms_norm_eps,
        gated=True,
        max_positions=c.max_position_embeddings,
        rotary=True,
        windows=windows,
        tied=c.tie_word_embeddings,
    )


def _llama(c: PretrainedConfig) -> ModelSpec:
    return _llama_like(c, qkv_bias=c.attention_bias, out_bias=c.attention_bias, mlp_bias=c.mlp_bias)


def _mistral(c: PretrainedConfig) -> ModelSpec:
    return _llama_like(c, windows=(c.sliding_window,) * c.num_hidden_layers)


def _layer_windows(c: PretrainedConfig) -> tuple[int | None, ...]:
    kinds = c.layer_types or ["full_attention"] * c.num_hidden_layers
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown:
        raise UnsupportedModel(f"layers of the type {sorted(unknown)[0]} are not supported")
    return tuple(c.sliding_window if kind == "sliding_attention" else None for kind in kinds)


def _qwen2(c: PretrainedConfig) -> ModelSpec:
    return _llama_like(c, qkv_bias=True, windows=_layer_windows(c))


def _qwen3(c: PretrainedConfig) -> ModelSpec:
    return _llama_like(
        c,
        qkv_bias=c.attention_bias,
        out_bias=c.attention_bias,
        qk_norm=True,
        windows=_layer_windows(c),
    )


ARCHITECTURES: dict[str, Row] = {
    "opt": _opt,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "bloom": _bloom,
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}
