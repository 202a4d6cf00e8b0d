"""Fields in which a family's tiny config differs from what `family_configs.SIZES` makes of it."""

from typing import Any

WINDOW = 8  # tokens of windows, chunks and blocks

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
_INKLING2 = {
    "unpadded_vocab_size": 862,  # the head has fewer rows than the embedding
    "num_hidden_layers": 6,
    "layer_types": ["hybrid_sliding", "hybrid"] * 3,
    "n_layers_per_attn_res_block": 2,
}
_DOTS3 = {"per_layer_config": {}, "head_dim": 16}


def _inside(name: str, row: dict[str, Any]) -> dict[str, Any]:
    return {f"{name}.{key}": value for key, value in row.items()}


_SWA = ["sliding_attention", "full_attention", "sliding_attention"]

ROWS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_group_size": 2},
    "bamba": {"num_hidden_layers": 3, "attn_layer_indices": [1], "time_step_limit": (0.6, 0.9)},
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
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 8},
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
    },
    # Shorter windows choose keys by scores that tie, which no row of a run may reach.
    "doge": {"keep_window_size": 64},
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
    "dory": {
        **dict.fromkeys(("n_input_layers", "n_recurrent_layers", "n_output_layers"), 2),
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "mlp", "full_attention", "mlp"]
        + ["sliding_attention", "mlp"],
    },
    "emu3": {
        "vocabulary_map": {"<image>": 850},
        **_inside("vq_config", {"base_channels": 32, "codebook_size": 64, "hidden_size": 32}),
    },
    "gemma3": {"text_config.rope_parameters": _GEMMA_ROPE},
    "gemma3_text": {"rope_parameters": _GEMMA_ROPE},
    "gemma3n": _inside("text_config", _GEMMA3N),
    "gemma3n_text": _GEMMA3N,
    "gemma4": _inside("text_config", _GEMMA4),
    "gemma4_text": _GEMMA4,
    "gemma4_unified": _inside("text_config", _GEMMA4),
    "gemma4_unified_text": _GEMMA4,
    "gpt_oss": {"rope_parameters": _YARN | {"truncate": False}},
    "granitemoehybrid": {"num_hidden_layers": 3, "layer_types": ["mamba", "attention", "mamba"]},
    "hrm_text": {"num_layers_per_stack": 2, "num_hidden_layers": 4},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "inkling2_loop_text": {
        **_INKLING2,
        "loop_layer_index_start": 2,
        "loop_layer_index_end": 4,
        "loop_num_passes": 2,
        "loop_gate_rank": 8,
    },
    "inkling2_text": _INKLING2,
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "laguna": {"layer_types": _SWA, "num_attention_heads_per_layer": [4, 4, 4]},
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
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
    "mamba2": {"head_dim": 16, "time_step_limit": (0.6, 0.9)},  # of dt: one that applies
    "mellum": {"layer_types": _SWA},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "index_n_heads": 2,
        "num_hidden_layers": 4,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    },
    "ministral": {"head_dim": 8},
    "mistral3": {"text_config.sliding_window": None},
    "mllama": {
        "text_config.num_hidden_layers": 3,
        "text_config.cross_attention_layers": [1],
        "vision_config.num_global_layers": 1,
        "vision_config.intermediate_layers_indices": [0],
        "vision_config.vision_output_dim": 64,
    },
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "nemotron_h": {"time_step_min": 0.6},
    "phi3": {"rope_parameters": _LONG, "max_position_embeddings": 64},
    "phimoe": {"sliding_window": WINDOW},
    "qwen4_exp": _inside("text_config", _QWEN4),
    "qwen4_exp_text": _QWEN4,
    # Of larger weights it makes 2e-4 of a change in their last bit.
    "qwen3_next": {"initializer_range": 0.1},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {
        "is_decoder": True,
        "axial_pos_shape": [8, 8],
        "axial_pos_embds_dim": [16, 16],
        "hash_seed": 0,
    },
    "roc_bert": {
        "pronunciation_embed_dim": 16,
        "shape_embed_dim": 16,
        "shape_vocab_size": 878,
        "pronunciation_vocab_size": 878,
    },
    "xlstm": {"hidden_size": 128, "embedding_dim": 128},  # widths of heads are multiples of 64
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
        "time_step_min": 0.6,
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

# Families that dschat may refuse, beside encoders and encoder-decoders: logits that depend on later
# tokens or on the sequence's length, one that AutoModelForCausalLM reads with missing weights, and
# Mllama, whose text part it does not read.
REFUSED = (
    *("bert-generation", "cpmant", "emu3", "mistral_large4", "mllama", "prophetnet", "reformer"),
    *("xlm", "xlnet"),
)
