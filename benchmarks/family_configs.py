"""Tiny configs of every causal-LM family of transformers, and checkpoints made from them.

`tiny_config` shrinks a family's default config by the names of its fields (``SIZES``), nested
configs too, and applies the family's row of ``ROWS``. Windows, attention chunks, top-k of indexers
and original lengths of rotary scalings shrink to 8 tokens or fewer: the rows of
`family_checks.py` cross all of them. A family with its own class for images and text is built as
that class, which is what people download.
"""

import copy
import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from dschat.builtin.tiny_model import tiny_tokenizer

PAD, END = 0, 1  # of the built-in tokenizer
NUM_MARKS = 32  # rows of the embedding behind the tokenizer's: ids of images and other marks
WINDOW = 8
TOP_K = 4

_WHOLE = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

# Beside the mapping's: published with images only, their text part is a causal LM.
FAMILIES = (*sorted(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), "mistral3", "mistral_large4")

_LAYERS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"),
    *("num_encoder_layers", "num_decoder_layers", "num_blocks", "num_hidden_groups"),
)

# Field of a config -> its value in a tiny one. Only fields that the family's default config sets.
SIZES: dict[str, Any] = {
    "vocab_size": 0,  # see `tiny_config`
    "initializer_range": 0.2,
    "init_std": 0.2,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "n_ctx": 64,
    "max_seq_len": 64,
    "model_max_length": 64,
    "context_length": 64,
    "max_target_positions": 64,
    # width
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_dim"), 32),
    **dict.fromkeys(("embedding_size", "input_embedding_size", "output_embedding_size"), 32),
    **dict.fromkeys(("word_embed_proj_dim", "lru_width", "out_hidden_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "dff", "dim_ff", "d_inner", "n_inner"), 48),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size"), 48),
    **dict.fromkeys(("feed_forward_size", "intermediate_size_mlp"), 48),
    **dict.fromkeys(("shared_intermediate_size", "dense_intermediate_size"), 48),
    **dict.fromkeys(("block_multiple_of", "ffn_round_up_to_multiple_of"), 16),
    # heads
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads", "attention_heads"), 4),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "num_query_groups"), 2),
    **dict.fromkeys(("head_dim", "global_head_dim", "dim_head", "d_head", "kv_channels"), 8),
    **dict.fromkeys(("attention_head_size", "swa_head_dim"), 8),
    **dict.fromkeys(("swa_num_attention_heads",), 4),
    **dict.fromkeys(("swa_num_key_value_heads",), 2),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    "qk_head_dim": 16,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "o_lora_rank": 16,
    "o_groups": 2,
    "rotary_dim": 4,
    "query_pre_attn_scalar": 8,
    # windows, indexers
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "window_size"), WINDOW),
    **dict.fromkeys(("attention_window_size", "local_attention", "keep_window_size"), WINDOW),
    **dict.fromkeys(("sliding_window_size", "local_attention_window_len"), WINDOW),
    **dict.fromkeys(("rel_extent", "floor_scale", "log_scaling_n_floor"), WINDOW),
    **dict.fromkeys(("block_size", "index_block_size", "mamba_chunk_size", "chunk_size"), WINDOW),
    **dict.fromkeys(("local_attn_chunk_length", "lsh_attn_chunk_length"), WINDOW),
    "original_max_position_embeddings": 16,
    "index_topk": TOP_K,
    "index_topk_blocks": 1,
    "index_n_heads": 2,
    "index_head_dim": 16,
    # mixtures of experts
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 4),
    **dict.fromkeys(("moe_num_experts", "zero_expert_num"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("shared_experts_intermediate_size", "router_hidden_size"), 16),
    **dict.fromkeys(("n_group", "num_expert_group"), 2),
    "topk_group": 1,
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    "moe_layer_start_index": 1,
    "moe_layer_end_index": 2,
    "num_nextn_predict_layers": 0,
    # recurrent layers
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 16),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "mamba_ngroups"), 1),
    **dict.fromkeys(("time_step_rank", "mamba_dt_rank"), 4),
    "mamba_d_ssm": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 8),
    "linear_num_heads": 4,
    "attention_hidden_size": 32,
    # vision, audio
    **dict.fromkeys(("ext_pw_out_channel", "depthwise_separable_out_channel"), 32),
    **dict.fromkeys(("nemo_conv_channels", "output_channels"), 32),
    "mlp_dim": 48,
    "image_size": 28,
    "patch_size": 14,
    "depth": 2,
    "vision_output_dim": 32,
    "num_position_embeddings": 16,
    "vocab_size_per_layer_input": 0,  # see `tiny_config`
    "hidden_size_per_layer_input": 8,
    "global_attn_indexes": [1],
}

_GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 1.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.5, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 16,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16,
}

# Family -> fields that differ from those of ``SIZES``; ``text_config.x`` is a field of a nested
# config.
_GEMMA3N = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
}
_GEMMA4 = {
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "per_layer_config": {2: {"head_dim": 16}},
}
_QWEN4 = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
    "output_gate_type": "sigmoid",
    "ple_embed_dim": 16,
    "hc_lowrank": 8,
}
_DOTS3 = {"per_layer_config": {}, "head_dim": 16}


def _inside(name: str, row: dict[str, Any]) -> dict[str, Any]:
    return {f"{name}.{key}": value for key, value in row.items()}


_SWA = ["sliding_attention", "full_attention", "sliding_attention"]

ROWS: dict[str, dict[str, Any]] = {
    "hrm_text": {"num_layers_per_stack": 2, "num_hidden_layers": 4},
    "laguna": {"layer_types": _SWA, "num_attention_heads_per_layer": [4, 4, 4]},
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
    "mellum": {"layer_types": _SWA},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "num_hidden_layers": 4,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
    "mistral3": {"text_config.sliding_window": None},
    "bamba": {"num_hidden_layers": 3, "attn_layer_indices": [1]},
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 8},
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
    },
    "gemma3": {"text_config.rope_parameters": _GEMMA_ROPE},
    "gemma3_text": {"rope_parameters": _GEMMA_ROPE},
    "gpt_oss": {"rope_parameters": _YARN | {"truncate": False}},
    "granitemoehybrid": {"num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"]},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "phimoe": {"sliding_window": WINDOW},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "bailing_hybrid": {"layer_group_size": 2},
    "blt": {
        "encoder_hash_byte_group_vocab": 64,
        **_inside("encoder_config", {"hidden_size_global": 32}),
        **_inside("decoder_config", {"hidden_size_global": 32}),
        **_inside("global_config", {"encoder_cross_output_size": 64}),
    },
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {
            "ffn_hidden_size": 48,
            "moe_num_experts": 4,
            "moe_top_k": 2,
            "hidden_size": 32,
        },
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "first_k_dense_replace": 1, "num_hidden_layers": 3},
    "deepseek_v3": {"rope_parameters": _YARN, "max_position_embeddings": 64},
    "dots1": {
        "num_experts_per_tok": 2,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
    "dots3_note": {
        **_inside("text_config", _DOTS3),
        "vision_config.adapter_in_dim": 32,
        "vision_config.adapter_out_dim": 32,
        "vision_config.per_layer_config": {},
        "audio_config.adapter_input_size": 32,
        "audio_config.adapter_out_dim": 32,
    },
    "dots3_note_text": _DOTS3,
    "emu3": {
        "vocabulary_map": {"<image>": 850},
        **_inside("vq_config", {"base_channels": 32, "codebook_size": 64, "hidden_size": 32}),
    },
    "gemma3n_text": _GEMMA3N,
    "gemma3n": _inside("text_config", _GEMMA3N),
    "gemma4_text": _GEMMA4,
    "gemma4": _inside("text_config", _GEMMA4),
    "gemma4_unified_text": _GEMMA4,
    "gemma4_unified": _inside("text_config", _GEMMA4),
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "llama4": {
        "text_config.num_experts_per_tok": 1,
        "text_config.moe_layers": [1, 2],
        "text_config.no_rope_layers": [1, 0, 1],
        "vision_config.vision_output_dim": 32,
        "vision_config.projector_input_dim": 32,
        "vision_config.projector_output_dim": 32,
    },
    "llama4_text": {"num_experts_per_tok": 1, "moe_layers": [1, 2], "no_rope_layers": [1, 0, 1]},
    "mamba2": {"head_dim": 16},
    "ministral": {"head_dim": 8},
    "mllama": {
        "text_config.num_hidden_layers": 3,
        "text_config.cross_attention_layers": [1],
        "vision_config.num_global_layers": 1,
        "vision_config.intermediate_layers_indices": [0],
        "vision_config.vision_output_dim": 64,
    },
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "phi3": {"rope_parameters": _LONG, "max_position_embeddings": 64},
    "qwen4_exp_text": _QWEN4,
    "qwen4_exp": _inside("text_config", _QWEN4),
    "reformer": {"is_decoder": True, "axial_pos_shape": [8, 8], "axial_pos_embds_dim": [16, 16]},
    "roc_bert": {
        "pronunciation_embed_dim": 16,
        "shape_embed_dim": 16,
        "shape_vocab_size": 878,
        "pronunciation_vocab_size": 878,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "kv_channels": 8,
        "mamba_headdim": 16,
        "n_mamba_heads": 4,
        "num_key_value_heads": 4,
    },
    "zaya": {"num_experts_per_tok": 1},
}

# Family -> why no checkpoint of it can be made.
NOT_BUILT = {
    "gemma3n": "its vision part needs the timm library; see gemma3n_text",
    "gemma4_assistant": "drafts for a Gemma 4, whose cache it reads; not a model of its own",
    "gemma4_unified_assistant": "drafts for a Gemma 4, whose cache it reads",
    "musicgen": "AutoModelForCausalLM does not build it from its own config",
    "musicgen_melody": "AutoModelForCausalLM does not build it from its own config",
}


def tokenizer():
    """The built-in tokenizer, by which the table's vocabulary is sized; made once."""
    return _tokenizer()


@functools.cache
def _tokenizer():
    return tiny_tokenizer()


def tiny_config(family: str) -> PretrainedConfig:
    """The family's config with every size shrunk."""
    row = ROWS.get(family, {})
    return _shrunk(_default(family, row), row, len(tokenizer()) + NUM_MARKS)


def _default(family: str, row: dict[str, Any]) -> PretrainedConfig:
    plain = {key: value for key, value in row.items() if "." not in key}
    try:
        return CONFIG_MAPPING[family]()
    except Exception:  # the defaults contradict each other, or a nested config is required
        return CONFIG_MAPPING[family](**plain)


def _shrunk(config: PretrainedConfig, row: dict[str, Any], vocab_size: int) -> PretrainedConfig:
    """A config of ``config``'s class; ``row`` as in ``ROWS``."""
    given = {key: value for key, value in config.to_dict().items() if value is not None}
    values = {name: size for name, size in SIZES.items() if name in given}
    values |= {name: vocab_size for name, size in values.items() if size == 0 and "vocab" in name}
    layers = {name: given[name] for name in _LAYERS if isinstance(given.get(name), int)}
    lists = _per_layer(given, set(layers.values()))
    num_layers = 3 if lists or "num_experts_per_tok" in given else 2
    values |= dict.fromkeys(layers, num_layers)
    lists = {name: kinds for name, kinds in lists.items() if name not in values}
    values |= {name: _cycle(kinds, num_layers) for name, kinds in lists.items()}
    marks = sorted(k for k in given if k.endswith(("_token_id", "_token_index")))
    marks = [k for k in marks if k not in ("bos_token_id", "eos_token_id", "pad_token_id")]
    if "vocab_size" in given or "text_config" in given:
        values |= {name: vocab_size - 1 - i for i, name in enumerate(marks)}
        values |= {"bos_token_id": END, "eos_token_id": END, "pad_token_id": PAD}
    if "kv_lora_rank" in given:  # multi-head latent attention
        values["num_key_value_heads"] = values["num_attention_heads"]
    for name in type(config).sub_configs:
        if isinstance(part := getattr(config, name, None), PretrainedConfig):
            inner = {k.partition(".")[2]: v for k, v in row.items() if k.startswith(f"{name}.")}
            values[name] = _shrunk(part, inner, vocab_size).to_dict()
    values |= {key: value for key, value in row.items() if "." not in key}
    return type(config)(**copy.deepcopy(values))


def _per_layer(given: dict[str, Any], counts: set[int]) -> dict[str, list]:
    """The lists with one entry per layer."""
    names = [k for k, v in given.items() if isinstance(v, list) and len(v) in counts and len(v) > 3]
    return {name: given[name] for name in names}


def _cycle(kinds: Iterable[Any], count: int) -> list:
    """``count`` entries in which every kind of ``kinds`` occurs, in the order of their first."""
    distinct = list(dict.fromkeys(kinds))
    if distinct[0] == "dense":  # dense first, then mixtures
        return [*distinct, *distinct[-1:] * count][:count]
    return (distinct * count)[: max(count, len(distinct))][:count]


def model_class(family: str, config: PretrainedConfig) -> Any:
    """The class whose checkpoints people download."""
    name = _WHOLE.get(family, "")
    if name.endswith("ForConditionalGeneration"):
        return getattr(transformers, name)
    return AutoModelForCausalLM


def build(family: str, seed: int = 0) -> PreTrainedModel:
    """A tiny model with random weights, fp32; vectors and router biases drawn too, so that a lost
    one shows.
    """
    config = tiny_config(family)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        loader = model_class(family, config)
        if loader is AutoModelForCausalLM:
            model = loader.from_config(config, dtype=torch.float32)
        else:
            model = loader(config)
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.dim() == 1 and name.endswith(("bias", "norm.weight")):
                centre = 0.0 if name.endswith("bias") else tensor.data.float().mean().item()
                tensor.data.normal_(centre, 0.1)
    return model.eval()


def save(family: str, folder: Path) -> PreTrainedModel:
    """The model that was written to ``folder``, as the library's own `save_pretrained` writes it,
    beside the built-in tokenizer.
    """
    model = build(family)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return model


def read_config(folder: Path) -> PretrainedConfig:
    """The config of a saved checkpoint."""
    return AutoConfig.from_pretrained(folder)
