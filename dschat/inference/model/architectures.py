"""Architecture table: describes each supported model family to the decoder, as data.

`model_spec` maps a transformers config to a `ModelSpec`: sizes, norms, positions, activation, and
the decoder weight that each checkpoint tensor fills. A new family is a new row of `ARCHITECTURES`.
"""

from collections.abc import Callable

from transformers import PretrainedConfig
from transformers.activations import ACT2FN

from dschat.inference.model import recent_families
from dschat.inference.model.spec import (
    ModelSpec,
    UnsupportedModel,
    WeightSource,
    both,
    check_shares,
    embeddings,
    per_layer,
    separate_qkv,
    sizes,
)

__all__ = ["ModelSpec", "UnsupportedModel", "WeightSource", "check_shares", "model_spec"]

Row = Callable[[PretrainedConfig], ModelSpec]

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")


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
        for layer_type in {rope for rope in (*spec.ropes, spec.rope(0)) if rope is not None}:
            parameters = config.rope_parameters
            kind = (parameters[layer_type] if layer_type else parameters)["rope_type"]
            if kind not in ROPE_TYPES:
                raise UnsupportedModel(f"rotary positions of the type {kind} are not supported")
    return spec


def _opt(c: PretrainedConfig) -> ModelSpec:
    base, layer = "model.decoder", "model.decoder.layers.{i}"
    bias = c.enable_bias
    sources = embeddings(f"{base}.embed_tokens", c.tie_word_embeddings)
    sources += [WeightSource(f"{base}.embed_positions.weight", "positions.weight")]
    if c.word_embed_proj_dim != c.hidden_size:
        sources += both(f"{base}.project_in", "project_in", bias=False)
        sources += both(f"{base}.project_out", "project_out", bias=False)
    sources += separate_qkv(f"{layer}.self_attn", bias)
    sources += per_layer(layer, {"out": "self_attn.out_proj", "up": "fc1", "down": "fc2"}, bias)
    sources += per_layer(layer, {"norm1": "self_attn_layer_norm", "norm2": "final_layer_norm"})
    has_final_norm = c.do_layer_norm_before and not c._remove_final_layer_norm
    if has_final_norm:
        sources += both(f"{base}.final_layer_norm", "final_norm")
    if not c.layer_norm_elementwise_affine or (c.do_layer_norm_before and not has_final_norm):
        raise UnsupportedModel("this OPT has layer norms without weights, or no final one")
    return ModelSpec(
        **sizes(c, grouped=False),
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
    sources = embeddings("transformer.wte", c.tie_word_embeddings)
    sources += [WeightSource("transformer.wpe.weight", "positions.weight")]
    sources += per_layer(layer, {"norm1": "ln_1", "norm2": "ln_2"})
    products = {"qkv": "attn.c_attn", "out": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"}
    sources += per_layer(layer, products, transposed=True)
    sources += both("transformer.ln_f", "final_norm")
    scale = sizes(c, grouped=False)["head_size"] ** -0.5 if c.scale_attn_weights else 1.0
    by_layer = c.scale_attn_by_inverse_layer_idx
    scales = tuple(scale / (i + 1 if by_layer else 1) for i in range(c.num_hidden_layers))
    return ModelSpec(
        **sizes(c, grouped=False),
        intermediate_size=c.n_inner or 4 * c.hidden_size,
        sources=tuple(sources),
        prefix="transformer.",
        activation=c.activation_function,
        norm_eps=c.layer_norm_epsilon,
        num_positions=c.max_position_embeddings,
        max_positions=c.max_position_embeddings,
        attention_scales=scales,
    )


_NORMS_AND_MLP = {
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
    "up": "mlp.dense_h_to_4h",
    "down": "mlp.dense_4h_to_h",
}


def _gpt_neox(c: PretrainedConfig) -> ModelSpec:
    layer = "gpt_neox.layers.{i}"
    sources = embeddings("gpt_neox.embed_in", c.tie_word_embeddings)
    sources += per_layer(layer, _NORMS_AND_MLP)
    qkv, out = {"qkv": "attention.query_key_value"}, {"out": "attention.dense"}
    sources += per_layer(layer, qkv, c.attention_bias, interleaved=True)
    sources += per_layer(layer, out, c.attention_bias)
    sources += both("gpt_neox.final_layer_norm", "final_norm")
    return ModelSpec(
        **sizes(c, grouped=False),
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
    sources = embeddings("transformer.word_embeddings", c.tie_word_embeddings)
    sources += both("transformer.word_embeddings_layernorm", "embed_norm")
    sources += per_layer(layer, _NORMS_AND_MLP | {"out": "self_attention.dense"})
    sources += per_layer(layer, {"qkv": "self_attention.query_key_value"}, interleaved=True)
    sources += both("transformer.ln_f", "final_norm")
    return ModelSpec(
        **sizes(c, grouped=False),
        intermediate_size=4 * c.hidden_size,
        sources=tuple(sources),
        prefix="transformer.",
        activation="gelu_new",
        norm_eps=c.layer_norm_epsilon,
        residual_after_norm=c.apply_residual_connection_post_layernorm,
        alibi=True,
    )


ARCHITECTURES: dict[str, Row] = {
    "opt": _opt,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "bloom": _bloom,
    **recent_families.ROWS,
}
