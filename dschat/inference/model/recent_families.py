"""Rows of the architecture table for families that are built like Llama: RMS norms, rotary
positions, gated MLPs.
"""

from collections.abc import Callable, Mapping
from typing import Any

from transformers import PretrainedConfig

from dschat.inference.model.spec import (
    ExpertSpec,
    ModelSpec,
    UnsupportedModel,
    WeightSource,
    both,
    embeddings,
    gated_mlp,
    per_layer,
    separate_qkv,
    sizes,
    stacked_experts,
)

_LAYER = "model.layers.{i}"
# Norms of a layer: the decoder's name -> the checkpoint's
_BEFORE = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
_AROUND = {
    "norm1": "input_layernorm",
    "out_norm": "post_attention_layernorm",
    "norm2": "pre_feedforward_layernorm",
    "down_norm": "post_feedforward_layernorm",
}
_AFTER = {"out_norm": "post_attention_layernorm", "down_norm": "post_feedforward_layernorm"}


def _llama_like(
    c: PretrainedConfig,
    *,
    qkv: list[WeightSource] | None = None,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp: list[WeightSource] | None = None,
    norms: Mapping[str, str] = _BEFORE,
    qk_norm: bool = False,
    **facts: Any,
) -> ModelSpec:
    """``qkv`` and ``mlp``: their sources, where these are not separate matrices, of the MLP without
    biases. ``facts``: fields of `ModelSpec`.
    """
    sources = embeddings("model.embed_tokens", c.tie_word_embeddings)
    sources += per_layer(_LAYER, norms, bias=False)
    sources += separate_qkv(f"{_LAYER}.self_attn", qkv_bias) if qkv is None else qkv
    if qk_norm:
        names = {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
        sources += per_layer(_LAYER, names, bias=False)
    sources += both(f"{_LAYER}.self_attn.o_proj", "layers.{i}.out", out_bias)
    sources += gated_mlp(f"{_LAYER}.mlp") if mlp is None else mlp
    sources += both("model.norm", "final_norm", bias=False)
    usual: dict[str, Any] = {
        "activation": getattr(c, "hidden_act", None),
        "norm": "rmsnorm",
        "norm_eps": getattr(c, "rms_norm_eps", None),
    }
    return ModelSpec(
        **sizes(c),
        intermediate_size=c.intermediate_size,
        sources=tuple(sources),
        prefix="model.",
        gated=True,
        max_positions=c.max_position_embeddings,
        rotary=True,
        **usual | facts,
    )


def _layer_windows(c: PretrainedConfig) -> tuple[int | None, ...]:
    kinds = c.layer_types or ["full_attention"] * c.num_hidden_layers
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown:
        raise UnsupportedModel(f"layers of the type {sorted(unknown)[0]} are not supported")
    return tuple(c.sliding_window if kind == "sliding_attention" else None for kind in kinds)


def _biases(c: PretrainedConfig) -> dict[str, Any]:
    return {"qkv_bias": c.attention_bias, "out_bias": c.attention_bias}


def _same(c: PretrainedConfig, value: Any) -> tuple[Any, ...]:
    """In all layers."""
    return (value,) * c.num_hidden_layers


def _llama(c: PretrainedConfig, **facts: Any) -> ModelSpec:
    facts = _biases(c) | facts
    return _llama_like(c, mlp=gated_mlp(f"{_LAYER}.mlp", c.mlp_bias), **facts)


def _qwen3_moe(c: PretrainedConfig) -> ModelSpec:
    module, mlp = f"{_LAYER}.mlp", list[WeightSource]()
    one = [f"{module}.experts.{{e}}.{part}_proj" for part in ("gate", "up", "down")]
    experts = both(f"{module}.gate", "layers.{i}.router", bias=False)
    experts += stacked_experts(f"{module}.experts", c.num_experts, one)
    for i in range(c.num_hidden_layers):
        is_mixed = i not in c.mlp_only_layers and c.num_experts > 0
        is_mixed = is_mixed and (i + 1) % c.decoder_sparse_step == 0
        mlp += [s.of_layer(i) for s in (experts if is_mixed else gated_mlp(module))]
    each = c.num_experts, c.num_experts_per_tok, c.moe_intermediate_size
    return _llama_like(
        c,
        **_biases(c),
        mlp=mlp,
        qk_norm=True,
        experts=ExpertSpec(*each, renormalized=c.norm_topk_prob),
        windows=_same(c, c.sliding_window),
    )


def _gemma(c: PretrainedConfig, **facts: Any) -> ModelSpec:
    if getattr(c, "use_bidirectional_attention", False):
        raise UnsupportedModel("this Gemma attends to later tokens")
    return _llama_like(
        c,
        **_biases(c),
        norms=_AROUND,
        activation=c.hidden_activation,
        norm_offset=1.0,
        embed_scale=c.hidden_size**0.5,
        windows=_layer_windows(c),
        attention_scales=_same(c, c.query_pre_attn_scalar**-0.5),
        logits_softcap=c.final_logit_softcapping,
        **facts,
    )


def _olmo2(c: PretrainedConfig, **facts: Any) -> ModelSpec:
    facts |= {"qk_norm": True, "whole_qk_norm": True}
    return _llama_like(c, **_biases(c), norms=_AFTER, **facts)


def _fused_mlp() -> list[WeightSource]:
    return per_layer(f"{_LAYER}.mlp", {"up": "gate_up_proj", "down": "down_proj"}, bias=False)


def _phi3(c: PretrainedConfig) -> ModelSpec:
    qkv = both(f"{_LAYER}.self_attn.qkv_proj", "layers.{i}.qkv", bias=False)
    windows = _same(c, c.sliding_window)
    return _llama_like(c, qkv=qkv, mlp=_fused_mlp(), partial_rotary=True, windows=windows)


def _granite(c: PretrainedConfig) -> ModelSpec:
    return _llama(
        c,
        attention_scales=_same(c, c.attention_multiplier),
        embed_scale=c.embedding_multiplier,
        residual_scale=c.residual_multiplier,
        logits_scale=1 / c.logits_scaling,
    )


def _smollm3(c: PretrainedConfig) -> ModelSpec:
    windows = _layer_windows(c) if c.use_sliding_window else ()
    return _llama(
        c, windows=windows, ropes=tuple("" if rope else None for rope in c.no_rope_layers)
    )


def _glm(c: PretrainedConfig, norms: Mapping[str, str] = _BEFORE) -> ModelSpec:
    return _llama_like(
        c,
        qkv_bias=c.attention_bias,
        mlp=_fused_mlp(),
        norms=norms,
        partial_rotary=True,
        interleaved_rotary=True,
    )


def _glm4(c: PretrainedConfig) -> ModelSpec:
    after = {"out_norm": "post_self_attn_layernorm", "down_norm": "post_mlp_layernorm"}
    return _glm(c, _BEFORE | after)


def _ministral3(c: PretrainedConfig) -> ModelSpec:
    rope, growth = c.rope_parameters, None
    if beta := rope.get("llama_4_scaling_beta"):
        growth = beta, rope["original_max_position_embeddings"]
    return _llama_like(c, windows=_same(c, c.sliding_window), query_growth=growth)


def _gpt_oss(c: PretrainedConfig) -> ModelSpec:
    experts = ExpertSpec(
        *(c.num_local_experts, c.num_experts_per_tok, c.intermediate_size),
        # NOTE: transformers 5.17 has them as constants of the module.
        clamped=(getattr(c, "swiglu_alpha", 1.702), getattr(c, "swiglu_limit", 7.0)),
    )
    layout: dict[str, Any] = {"bias": True, "transposed": True, "interleaved": True}
    mlp = both(f"{_LAYER}.mlp.router", "layers.{i}.router")
    mlp += stacked_experts(f"{_LAYER}.mlp.experts", experts.count, **layout)
    sinks = [WeightSource(f"{_LAYER}.self_attn.sinks", "layers.{i}.sinks.weight")]
    return _llama_like(c, **_biases(c), mlp=mlp + sinks, experts=experts, windows=_layer_windows(c))


def _mixtral(c: PretrainedConfig) -> ModelSpec:
    module, published = f"{_LAYER}.mlp", f"{_LAYER}.block_sparse_moe"
    one = [f"{published}.experts.{{e}}.{name}" for name in ("w1", "w3", "w2")]
    each = c.num_local_experts, c.num_experts_per_tok, c.intermediate_size
    gate, router = f"{module}.gate.weight", "layers.{i}.router.weight"
    mlp = [WeightSource(gate, router)]
    mlp += [WeightSource(f"{published}.gate.weight", router, instead=gate)]
    mlp += stacked_experts(f"{module}.experts", c.num_local_experts, one)
    windows = _same(c, c.sliding_window)
    return _llama_like(c, mlp=mlp, experts=ExpertSpec(*each), windows=windows)


def _cohere2(c: PretrainedConfig) -> ModelSpec:
    windows = _layer_windows(c)
    return _llama_like(
        c,
        **_biases(c),
        norms={"norm1": "input_layernorm"},
        norm="layernorm",
        norm_eps=c.layer_norm_eps,
        parallel_residual=True,
        windows=windows,
        ropes=tuple(None if window is None else "" for window in windows),
        interleaved_rotary=True,
        logits_scale=c.logit_scale,
    )


ROWS: dict[str, Callable[[PretrainedConfig], ModelSpec]] = {
    "llama": _llama,
    "mistral": lambda c: _llama_like(c, windows=_same(c, c.sliding_window)),
    "qwen2": lambda c: _llama_like(c, qkv_bias=True, windows=_layer_windows(c)),
    "qwen3": lambda c: _llama_like(c, **_biases(c), qk_norm=True, windows=_layer_windows(c)),
    "qwen3_moe": _qwen3_moe,
    "gemma3_text": lambda c: _gemma(c, qk_norm=True, ropes=tuple(c.layer_types)),
    "gemma2": lambda c: _gemma(c, attention_softcap=c.attn_logit_softcapping),
    "olmo2": _olmo2,
    "olmo3": lambda c: _olmo2(c, windows=_layer_windows(c), ropes=tuple(c.layer_types)),
    "phi3": _phi3,
    "granite": _granite,
    "smollm3": _smollm3,
    "glm": _glm,
    "glm4": _glm4,
    "ministral3": _ministral3,
    "gpt_oss": _gpt_oss,
    "mixtral": _mixtral,
    "seed_oss": lambda c: _llama(c, out_bias=c.attention_out_bias),
    "cohere2": _cohere2,
}
