"""Builds tiny models of the families that the decoder runs, and of their variants.

For a name in ``CONFIGS``: a Hugging Face module, an engine filled from it, and the oracle of its
log-probs. Rotary scalings are chosen so that they matter within ``POSITIONS``, attention windows so
that prompts and answers exceed them.
"""

import sys
from functools import partial
from pathlib import Path

import pytest
import quick
import torch
from transformers import (
    CONFIG_MAPPING,
    ArceeConfig,
    AutoModelForCausalLM,
    BioGptConfig,
    BloomConfig,
    Cohere2Config,
    CohereConfig,
    Dots1Config,
    Ernie4_5Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    GlmConfig,
    GPT2Config,
    GPTBigCodeConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeSharedConfig,
    HeliumConfig,
    LlamaConfig,
    MiniMaxM2Config,
    Ministral3Config,
    MistralConfig,
    MixtralConfig,
    NemotronConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SeedOssConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
)

from dschat.inference import EngineConfig, InferenceEngine
from dschat.inference.protocol import Rollout

sys.path.append(str(Path(__file__).parents[1] / "dist"))  # where a command has only this folder's
import tiny_models  # noqa: E402

VOCAB, EOS, POSITIONS = tiny_models.VOCAB, tiny_models.EOS, tiny_models.POSITIONS
HEADS, HIDDEN = 4, 32

# One token, several of one length, longer than any window; EOS inside; twice the same.
PROMPTS = [
    [5],
    [7, 8, 9, 10, 11, 12, 13],
    list(range(2, 32)),
    [40, EOS, 41, 42, 43],
    [20, 21, 22],
    list(range(60, 43, -1)),
    [7, 8, 9, 10, 11, 12, 13],
    [9] * 30,
]

_IDS = tiny_models.IDS | {"pad_token_id": EOS}
_SMALL = tiny_models.SMALL | {"num_attention_heads": HEADS, "intermediate_size": 48}
_NEOX = _IDS | _SMALL | {"rotary_pct": 0.5}
_LLAMA = _IDS | _SMALL | {"num_key_value_heads": 2}
_OPT = tiny_models.OPT | _IDS | {"num_attention_heads": HEADS}
_GPT2 = tiny_models.GPT2 | _IDS | {"n_layer": 3, "n_head": HEADS}
_BLOOM = _IDS | {"n_layer": 2, "initializer_range": 0.3}


_MOE = _LLAMA | {"num_experts_per_tok": 2, "num_hidden_layers": 3}
_GROUPS = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 24}
_GROUPS |= {"routed_scaling_factor": 1.7}
_LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 12, "q_lora_rank": 20, "v_head_dim": 8}
_LATENT |= {"qk_nope_head_dim": 10, "qk_rope_head_dim": 6}
_KINDS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_GEMMA = _LLAMA | _KINDS | {"num_hidden_layers": 3, "sliding_window": 6, "head_dim": 12}
_GEMMA |= {"query_pre_attn_scalar": 10, "final_logit_softcapping": 5.0}


_YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}


_KINDS_OF_ROPE = {
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        "full_attention": _YARN | {"partial_rotary_factor": 0.5},
    }
}


def _rope(kind, **more):
    rope = {"rope_type": kind, "rope_theta": 100.0} | more
    return lambda: LlamaConfig(**_LLAMA, rope_parameters=rope)


def longrope(inside, **beside):
    """A Llama with LongRoPE; ``inside`` and ``beside`` its rope_parameters is what else it says."""
    half_head = HIDDEN // HEADS // 2
    rope = {
        "rope_type": "longrope",
        "rope_theta": 100.0,
        "factor": 4.0,
        "short_factor": [1.0 + i for i in range(half_head)],
        "long_factor": [9.0] * half_head,
    }
    sizes = _LLAMA | {"max_position_embeddings": 4 * POSITIONS}
    return LlamaConfig(**sizes, rope_parameters=rope | inside, **beside)


_LONGROPE = longrope({}).rope_parameters

# Layers that carry states, with attention of three kinds and experts.
STATEFUL = {
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention", "conv"],
        "moe_intermediate_size": 24,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_dense_layers": 1,
    },
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "head_dim": 12,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention", "mamba"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 20,
        "residual_multiplier": 0.6,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 8,
    },
    "jamba": {  # reads a linear layer's weight, and starts from no state but with one token
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "num_experts": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "kimi_linear": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "num_key_value_heads": 4,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 6,
        "v_head_dim": 8,
        "linear_num_heads": 4,
        "linear_head_dim": 8,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "num_expert_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 24,
    },
}


def _with_states(name):
    return CONFIG_MAPPING[name](**_LLAMA | {"num_hidden_layers": 3} | STATEFUL[name])


CONFIGS = {
    "opt": lambda: OPTConfig(**_OPT),
    "opt_350m": lambda: OPTConfig(
        **_OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 16}
    ),
    "opt_no_bias": lambda: OPTConfig(**_OPT, enable_bias=False, tie_word_embeddings=False),
    "gpt2": lambda: GPT2Config(**_GPT2),
    "gpt2_inverse_layer": lambda: GPT2Config(
        **_GPT2, scale_attn_by_inverse_layer_idx=True, n_inner=40, activation_function="relu"
    ),
    "gpt2_unscaled": lambda: GPT2Config(
        **_GPT2, scale_attn_weights=False, tie_word_embeddings=False
    ),
    "gpt_neox": lambda: GPTNeoXConfig(**_NEOX),
    "gpt_neox_serial": lambda: GPTNeoXConfig(
        **_NEOX | {"rotary_pct": 1.0}, use_parallel_residual=False, attention_bias=False
    ),
    "bloom": lambda: BloomConfig(**_BLOOM, hidden_size=48, n_head=6),
    "bloom_residual_after_norm": lambda: BloomConfig(
        **_BLOOM, hidden_size=32, n_head=4, apply_residual_connection_post_layernorm=True
    ),
    "llama": lambda: LlamaConfig(**_LLAMA),
    "llama_biases": lambda: LlamaConfig(**_LLAMA, attention_bias=True, mlp_bias=True),
    "llama_tied": lambda: LlamaConfig(**_LLAMA, tie_word_embeddings=True),
    # transformers heeds a partial_rotary_factor in GPT-NeoX alone of the families here
    "llama_partial": lambda: LlamaConfig(**_LLAMA, partial_rotary_factor=0.5),
    "llama_linear": _rope("linear", factor=3.0),
    "llama_dynamic": _rope("dynamic", factor=4.0),
    "llama_yarn": _rope("yarn", factor=4.0, original_max_position_embeddings=16),
    "llama_llama3": _rope(
        "llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=16,
    ),
    "llama_longrope": lambda: longrope({"original_max_position_embeddings": POSITIONS}),
    "mistral": lambda: MistralConfig(**_LLAMA, sliding_window=6),
    "mistral_no_window": lambda: MistralConfig(**_LLAMA | {"sliding_window": None}),
    "qwen2": lambda: Qwen2Config(**_LLAMA),
    "qwen2_mixed_layers": lambda: Qwen2Config(
        **_LLAMA, use_sliding_window=True, sliding_window=9, max_window_layers=1
    ),
    "qwen3_partial": lambda: Qwen3Config(**_LLAMA, head_dim=12, partial_rotary_factor=0.25),
    "qwen3": lambda: Qwen3Config(**_LLAMA, head_dim=12, attention_bias=True),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **_MOE, head_dim=12, num_experts=5, moe_intermediate_size=16, mlp_only_layers=[1]
    ),
    "qwen3_moe_not_renormalized": lambda: Qwen3MoeConfig(
        **_MOE,
        num_experts=3,
        moe_intermediate_size=16,
        norm_topk_prob=False,
        attention_bias=True,
        decoder_sparse_step=2,
        use_sliding_window=True,
        sliding_window=6,
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **_GEMMA,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0},
        },
    ),
    "gemma3_untied": lambda: Gemma3TextConfig(
        **_GEMMA | {"final_logit_softcapping": None},
        attention_bias=True,
        tie_word_embeddings=False,
    ),
    "gemma2": lambda: Gemma2Config(
        **_GEMMA, attn_logit_softcapping=2.0, attn_implementation="eager"
    ),
    "olmo2": lambda: Olmo2Config(**_LLAMA, attention_bias=True),
    "olmo3": lambda: Olmo3Config(
        **_LLAMA | _KINDS | {"num_hidden_layers": 3},
        sliding_window=6,
        tie_word_embeddings=True,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            "full_attention": _YARN,
        },
    ),
    "phi3": lambda: Phi3Config(**_LLAMA, sliding_window=6, partial_rotary_factor=0.5),
    "phi3_longrope": lambda: Phi3Config(
        **_LLAMA | {"max_position_embeddings": 4 * POSITIONS},
        original_max_position_embeddings=POSITIONS,
        rope_parameters=_LONGROPE,
    ),
    "granite": lambda: GraniteConfig(
        **_LLAMA,
        attention_bias=True,
        mlp_bias=True,
        attention_multiplier=0.3,
        embedding_multiplier=3.0,
        residual_multiplier=0.6,
        logits_scaling=0.7,
        tie_word_embeddings=True,
    ),
    "smollm3": lambda: SmolLM3Config(
        **_LLAMA | {"num_hidden_layers": 3}, no_rope_layers=[1, 0, 1], tie_word_embeddings=True
    ),
    "smollm3_windows": lambda: SmolLM3Config(
        **_LLAMA | {"num_hidden_layers": 3},
        no_rope_layers=[1, 0, 1],
        use_sliding_window=True,
        sliding_window=6,
        attention_bias=True,
        mlp_bias=True,
    ),
    "glm": lambda: GlmConfig(**_LLAMA, head_dim=12, attention_bias=True),
    "glm4": lambda: Glm4Config(
        **_LLAMA, head_dim=8, attention_bias=True, partial_rotary_factor=1.0
    ),
    "ministral3": lambda: Ministral3Config(
        **_LLAMA, sliding_window=6, rope_parameters=_YARN | {"llama_4_scaling_beta": 0.5}
    ),
    "gpt_oss": lambda: GptOssConfig(
        **_MOE | _KINDS,
        head_dim=8,
        num_local_experts=4,
        sliding_window=6,
        **({"swiglu_limit": 0.7} if hasattr(GptOssConfig, "swiglu_limit") else {}),
        rope_parameters=_YARN | {"truncate": False},
    ),
    "mixtral": lambda: MixtralConfig(**_MOE, num_local_experts=4, sliding_window=6),
    "seed_oss": lambda: SeedOssConfig(
        **_LLAMA, head_dim=12, attention_bias=True, attention_out_bias=True, mlp_bias=True
    ),
    "cohere2": lambda: Cohere2Config(
        **_LLAMA | _KINDS | {"num_hidden_layers": 3}, sliding_window=6, logit_scale=0.7
    ),
    "arcee": lambda: ArceeConfig(**_LLAMA, head_dim=8),
    "biogpt": lambda: BioGptConfig(**_IDS | _SMALL),
    "cohere": lambda: CohereConfig(**_LLAMA, logit_scale=0.7),
    "dots1": lambda: Dots1Config(**_MOE, **_GROUPS, first_k_dense_replace=1, n_shared_experts=2),
    # Queries from a latent or from the input; pairs rotated in place, moved, or halves.
    "deepseek_v2": lambda: CONFIG_MAPPING["deepseek_v2"](
        **_MOE | _GROUPS | _LATENT | {"q_lora_rank": None}, first_k_dense_replace=1
    ),
    "deepseek_v3": lambda: CONFIG_MAPPING["deepseek_v3"](
        **_MOE | _GROUPS | _LATENT,
        first_k_dense_replace=1,
        attention_bias=True,
        rope_parameters=_YARN | {"mscale": 0.7, "mscale_all_dim": 0.7},
    ),
    "glm4_moe_lite": lambda: CONFIG_MAPPING["glm4_moe_lite"](
        **_MOE | _GROUPS | _LATENT | {"v_head_dim": 16}, rms_norm_eps=1e-4
    ),
    "minicpm3": lambda: CONFIG_MAPPING["minicpm3"](
        **_LLAMA | _LATENT, scale_depth=1.4, scale_emb=3.0
    ),
    "ernie4_5": lambda: Ernie4_5Config(**_LLAMA, head_dim=12, use_bias=True),
    "exaone4": lambda: Exaone4Config(**_LLAMA, head_dim=12, sliding_window=6),
    "glm4_moe": lambda: Glm4MoeConfig(
        **_MOE, **_GROUPS, head_dim=12, use_qk_norm=True, attention_bias=True
    ),
    "gpt_bigcode": lambda: GPTBigCodeConfig(**_GPT2),
    "granitemoe": lambda: GraniteMoeConfig(
        **_MOE, num_local_experts=4, residual_multiplier=0.3, logits_scaling=2.0
    ),
    "granitemoeshared": lambda: GraniteMoeSharedConfig(
        **_MOE, num_local_experts=4, shared_intermediate_size=20, embedding_multiplier=3.0
    ),
    "helium": lambda: HeliumConfig(**_LLAMA, head_dim=8),
    "minimax_m2": lambda: MiniMaxM2Config(**_MOE, num_local_experts=4, head_dim=12),
    "nemotron": lambda: NemotronConfig(**_LLAMA, head_dim=8),
    "olmoe": lambda: OlmoeConfig(**_MOE, num_experts=4),
    "phi": lambda: PhiConfig(**_LLAMA),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **_MOE, num_experts=4, moe_intermediate_size=24, shared_expert_intermediate_size=20
    ),
    "stablelm": lambda: StableLmConfig(**_LLAMA, use_qkv_bias=True),
    "starcoder2": lambda: Starcoder2Config(**_LLAMA, sliding_window=6),
    "ernie4_5_moe": lambda: CONFIG_MAPPING["ernie4_5_moe"](
        **_MOE, moe_num_experts=4, moe_k=2, moe_intermediate_size=24, moe_num_shared_experts=1
    ),
    # Layer norms of heads; norms behind the rotation.
    "persimmon": lambda: CONFIG_MAPPING["persimmon"](**_IDS | _SMALL, partial_rotary_factor=0.5),
    "hunyuan_v1_dense": lambda: CONFIG_MAPPING["hunyuan_v1_dense"](**_LLAMA, head_dim=12),
    # Norms without weights; rotated backwards; adjacent elements of a part of a head.
    "olmo": lambda: CONFIG_MAPPING["olmo"](**_LLAMA),
    "nanochat": lambda: CONFIG_MAPPING["nanochat"](**_LLAMA),
    "gptj": lambda: CONFIG_MAPPING["gptj"](
        **_IDS, n_embd=32, n_layer=2, n_head=4, n_positions=POSITIONS, rotary_dim=4
    ),
    # Gates of each element, and of each head by softplus.
    "afmoe": lambda: CONFIG_MAPPING["afmoe"](
        **_MOE | _KINDS,
        head_dim=12,
        sliding_window=6,
        num_experts=4,
        num_dense_layers=1,
        moe_intermediate_size=24,
        route_scale=1.7,
    ),
    "laguna": lambda: CONFIG_MAPPING["laguna"](
        **_MOE | _KINDS | _KINDS_OF_ROPE,
        head_dim=8,
        sliding_window=6,
        num_experts=4,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=20,
        mlp_layer_types=["dense", "sparse", "sparse"],
    ),
    **{name: partial(_with_states, name) for name in STATEFUL},
}


# One of each layout and kind of position; the rest differ from one of these by a line or two.
CORE = ("opt", "opt_350m", "gpt2", "gpt_neox", "bloom", "llama", "mistral", "qwen2", "qwen3")
CORE += ("qwen3_moe", "gemma3", "gpt_oss", "olmo3")


# Of these: attention's products in one transposed weight, and in three with biases; experts.
FEW = ("gpt2", "gpt_oss")


# The gap of families in which a decode sums in another order than a prefill.
GAPS = {"qwen3_5_text": 2e-4, "kimi_linear": 2e-4}


def every_family():
    """Parametrize by ``name``; what is not in ``FEW`` is left to the slow tests."""
    return pytest.mark.parametrize("name", quick.some(CONFIGS, FEW))


def build(name, seed=0):
    """The module of ``CONFIGS[name]``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32)
        for _, buffer in saved(module):
            buffer.normal_(0.0, 0.3)
        return tiny_models.randomized(module)


def stream(module):
    """The weight stream of a module."""
    return (
        (name, tensor.detach()) for name, tensor in [*module.named_parameters(), *saved(module)]
    )


def saved(module):
    """The buffers that checkpoints hold, by name."""
    names = module.state_dict().keys()
    return [(name, buffer) for name, buffer in module.named_buffers() if name in names]


DEFAULT_SIZES = {"stop_ids": (EOS,), "max_num_seqs": 8, "max_seq_len": POSITIONS}


def empty_engine(config, **knobs):
    """An engine without weights; by default fp32, of 8 slots and ``POSITIONS`` tokens."""
    group, dtype = knobs.pop("group", None), knobs.pop("dtype", torch.float32)
    sizes = EngineConfig(**{**DEFAULT_SIZES, **knobs})
    return InferenceEngine(config, dtype, torch.device("cpu"), sizes, group)


def on_stacks(made):
    """Keep an engine's experts in one tensor, as on a device."""
    made.weights._stacks = True
    made.weights.backends = dict.fromkeys(made.weights.backends, "plain")
    return made


def engine(module, **knobs):
    """`empty_engine` with the weights of ``module``."""
    made = empty_engine(module.config, **knobs)
    made.weights.load(stream(module))
    return made


def rollout_of(prompts):
    """The answers of complete `OpenPrompt`s."""
    rollout = Rollout()
    for prompt in prompts:
        rollout.token_ids += prompt.token_ids
        rollout.logprobs += prompt.logprobs
        rollout.finish_reasons += [reason for reason in prompt.finish_reasons if reason]
    assert len(rollout.finish_reasons) == len(rollout), "a prompt is not complete"
    return rollout


def assert_same(got, expected, gap=5e-5):
    """Two rollouts: the same tokens, and log-probs but for rounding."""
    assert got.token_ids == expected.token_ids
    assert got.finish_reasons == expected.finish_reasons
    for a, b in zip(got.logprobs, expected.logprobs, strict=True):
        assert a == pytest.approx(b, abs=gap)


def assert_same_but_for_ties(got, expected, gap):
    """Two greedy rollouts: where an answer first differs, both tokens are as likely, to ``gap``."""
    for one, other in zip(got, expected, strict=True):
        pairs = zip(one.token_ids, other.token_ids, strict=False)
        end = next((i + 1 for i, (a, b) in enumerate(pairs) if a != b), None)
        assert one.logprobs[:end] == pytest.approx(other.logprobs[:end], abs=gap)
        assert end is not None or len(one.token_ids) == len(other.token_ids)


def examples(quick, full):
    """How many random examples a test takes, in the quick suite and in the whole one."""
    from hypothesis import HealthCheck, settings

    is_quick = settings.default.max_examples < 100  # tests/conftest.py
    count = quick if is_quick else full
    ignored = [HealthCheck.function_scoped_fixture]
    return settings(max_examples=count, deadline=None, suppress_health_check=ignored)


def cache_gib(made, num_tokens):
    """The ``kv_cache_gib`` that holds just ``num_tokens`` of an engine like ``made``."""
    return num_tokens * made.bytes_per_token() / 2**30


@torch.no_grad()
def reference_logprobs(module, prompt, answer, temperature=1.0):
    """Log-probs of ``answer`` by one full forward of transformers, without a cache."""
    ids = torch.tensor([prompt + answer], device=module.device)
    logits = module(ids, use_cache=False).logits[0].cpu()
    logprobs = (logits[len(prompt) - 1 : -1].double() / temperature).log_softmax(-1)
    return logprobs.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)


def logprob_gap(module, prompts, rollout, temperature=1.0):
    """Largest difference between a rollout's log-probs and transformers'."""
    n = len(rollout) // len(prompts)
    gaps = [
        reference_logprobs(module, prompts[i // n], answer, temperature) - torch.tensor(logprobs)
        for i, (answer, logprobs) in enumerate(
            zip(rollout.token_ids, rollout.logprobs, strict=True)
        )
    ]
    return torch.cat(gaps).abs().max().item()
