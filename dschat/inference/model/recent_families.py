"""Rows of the architecture table for families that are built like Llama: RMS norms, rotary
positions, gated MLPs.
"""

from collections.abc import Mapping
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
    separate_qkv,
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


def _llama_like(
    c: PretrainedConfig,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp: list[WeightSource] | None = None,
    norms: Mapping[str, str] = _BEFORE,
    qk_norm: bool = False,
    **facts: Any,
) -> ModelSpec:
    """``mlp``: its sources, where they are not separate matrices without biases. ``facts``: fields
    of `ModelSpec`.
    """
    sources = embeddings("model.embed_tokens", "lm_head", c.tie_word_embeddings)
    for target, name in norms.items():
        sources += both(f"{_LAYER}.{name}", f"layers.{{i}}.{target}", bias=False)
    sources += separate_qkv(f"{_LAYER}.self_attn", qkv_bias)
    if qk_norm:
        sources += both(f"{_LAYER}.self_attn.q_norm", "layers.{i}.q_norm", bias=False)
        sources += both(f"{_LAYER}.self_attn.k_norm", "layers.{i}.k_norm", bias=False)
    sources += both(f"{_LAYER}.self_attn.o_proj", "layers.{i}.out", out_bias)
    sources += gated_mlp(f"{_LAYER}.mlp") if mlp is None else mlp
    sources += both("model.norm", "final_norm", bias=False)
    facts.setdefault("activation", getattr(c, "hidden_act", None))
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
        norm="rmsnorm",
        norm_eps=c.rms_norm_eps,
        gated=True,
        max_positions=c.max_position_embeddings,
        rotary=True,
        tied=c.tie_word_embeddings,
        **facts,
    )


def _layer_windows(c: PretrainedConfig) -> tuple[int | None, ...]:
    kinds = c.layer_types or ["full_attention"] * c.num_hidden_layers
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown:
        raise UnsupportedModel(f"layers of the type {sorted(unknown)[0]} are not supported")
    return tuple(c.sliding_window if kind == "sliding_attention" else None for kind in kinds)


def _one_window(c: PretrainedConfig) -> tuple[int | None, ...]:
    return (c.sliding_window,) * c.num_hidden_layers


def _biases(c: PretrainedConfig) -> dict[str, Any]:
    return {"qkv_bias": c.attention_bias, "out_bias": c.attention_bias}


def llama(c: PretrainedConfig) -> ModelSpec:
    return _llama_like(c, **_biases(c), mlp=gated_mlp(f"{_LAYER}.mlp", c.mlp_bias))


def mistral(c: PretrainedConfig) -> ModelSpec:
    return _llama_like(c, windows=_one_window(c))


def qwen2(c: PretrainedConfig) -> ModelSpec:
    return _llama_like(c, qkv_bias=True, windows=_layer_windows(c))


def qwen3(c: PretrainedConfig) -> ModelSpec:
    return _llama_like(c, **_biases(c), qk_norm=True, windows=_layer_windows(c))


def qwen3_moe(c: PretrainedConfig) -> ModelSpec:
    module, mlp = f"{_LAYER}.mlp", list[WeightSource]()
    one = [f"{module}.experts.{{e}}.{part}_proj" for part in ("gate", "up", "down")]
    experts = both(f"{module}.gate", "layers.{i}.router", bias=False)
    experts += stacked_experts(f"{module}.experts", c.num_experts, one)
    for i in range(c.num_hidden_layers):
        is_mixed = i not in c.mlp_only_layers and c.num_experts > 0
        is_mixed = is_mixed and (i + 1) % c.decoder_sparse_step == 0
        mlp += [s.of_layer(i) for s in (experts if is_mixed else gated_mlp(module))]
    sizes = c.num_experts, c.num_experts_per_tok, c.moe_intermediate_size
    return _llama_like(
        c,
        **_biases(c),
        mlp=mlp,
        qk_norm=True,
        experts=ExpertSpec(*sizes, renormalized=c.norm_topk_prob),
        windows=_one_window(c),
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
        attention_scales=(c.query_pre_attn_scalar**-0.5,) * c.num_hidden_layers,
        logits_softcap=c.final_logit_softcapping,
        **facts,
    )


def gemma3(c: PretrainedConfig) -> ModelSpec:
    return _gemma(c, qk_norm=True, ropes=tuple(c.layer_types))
