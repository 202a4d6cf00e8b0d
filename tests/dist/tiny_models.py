"""Tiny checkpoints made from configs, for every test that needs a model: fp32, 64 tokens.

`ensure` makes a Hugging Face folder with tokenizer for a name. Weights are drawn
wide (0.3 and more), so that a token's distribution depends on its whole context and no test passes
by symmetry.
"""

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BambaConfig,
    BloomConfig,
    GPT2Config,
    GPTNeoConfig,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    NemotronHConfig,
    OPTConfig,
    PhiConfig,
    PreTrainedTokenizerFast,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    RecurrentGemmaConfig,
)

VOCAB, EOS, PAD, POSITIONS = 64, 0, 1, 64


def tokenizer(pad_is_eos: bool = False, reverse: bool = False) -> PreTrainedTokenizerFast:
    """A word-level tokenizer: id 0 ends, id 1 pads (or EOS does), ``w2`` ... ``w63`` are words; or
    ``w63`` ... ``w2``.
    """
    ids = reversed(range(2, VOCAB)) if reverse else range(2, VOCAB)
    words = {"<eos>": EOS, "<pad>": PAD} | {f"w{i}": n for n, i in enumerate(ids, 2)}
    inner = Tokenizer(models.WordLevel(words, unk_token="w2"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<eos>", pad_token="<eos>" if pad_is_eos else "<pad>"
    )


IDS = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": EOS, "pad_token_id": PAD}
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.3,
}
# Of Qwen3.5: a layer with states, of more value than key heads.
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
# Of DeepSeek V3: latent attention, whose keys are wider than values, and routed experts.
LATENT = {
    "kv_lora_rank": 8,
    "q_lora_rank": 12,
    "head_dim": 4,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 10,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
_LLAMA = IDS | SMALL | {"intermediate_size": 48, "num_key_value_heads": 1}
OPT = IDS | {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "ffn_dim": 48,
    "word_embed_proj_dim": 32,
    "max_position_embeddings": POSITIONS,
    "init_std": 0.3,
    "dropout": 0.1,
}
_MOE = _LLAMA | {"head_dim": 16, "num_experts_per_tok": 2}
GPT2 = IDS | {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": POSITIONS,
    "initializer_range": 0.3,
}

CONFIGS = {
    "llama": lambda: LlamaConfig(**_LLAMA),
    "llama_stops": lambda: LlamaConfig(
        **_LLAMA | {"num_key_value_heads": 2, "eos_token_id": [EOS, *range(20, 40)]}
    ),
    "llama_tied": lambda: LlamaConfig(**_LLAMA, tie_word_embeddings=True),
    "opt": lambda: OPTConfig(**OPT),
    "opt_350m": lambda: OPTConfig(
        **OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 16}
    ),
    "gpt2": lambda: GPT2Config(**GPT2),
    "gpt_neox": lambda: GPTNeoXConfig(
        **IDS | SMALL | {"intermediate_size": 48, "rotary_pct": 0.5, "use_parallel_residual": True}
    ),
    "bloom": lambda: BloomConfig(**IDS, hidden_size=32, n_layer=2, n_head=2, initializer_range=0.3),
    "mistral": lambda: MistralConfig(**_LLAMA, sliding_window=4),
    "qwen3": lambda: Qwen3Config(**_LLAMA, head_dim=16),
}

# Families without an entry in the inference engine.
OTHERS = {
    "phi": lambda: PhiConfig(**IDS | SMALL, intermediate_size=48),
    "gpt_neo": lambda: GPTNeoConfig(  # local layers that count columns
        **IDS,
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        attention_types=[[["global", "local"], 1]],
        window_size=4,
        max_position_embeddings=POSITIONS,
        initializer_range=0.3,
    ),
    "qwen3_moe": lambda: Qwen3MoeConfig(**_MOE, num_experts=4, moe_intermediate_size=16),
    "gpt_oss": lambda: GptOssConfig(**_MOE, num_local_experts=4, sliding_window=4),
    "bamba": lambda: BambaConfig(  # positions start again where none are given
        **_LLAMA,
        attn_layer_indices=[1],
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_d_state=8,
        mamba_n_groups=1,
        mamba_chunk_size=8,
    ),
    "qwen3_5": lambda: Qwen3_5TextConfig(  # reads the weight of a convolution that it does not run
        **_LLAMA,
        head_dim=16,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
    "nemotron_h": lambda: NemotronHConfig(  # likewise, and a mixture of experts
        **_LLAMA | {"num_hidden_layers": 3},
        head_dim=16,
        layers_block_type=["linear_attention", "moe", "full_attention"],
        mamba_num_heads=4,
        mamba_head_dim=16,
        ssm_state_size=8,
        n_groups=1,
        chunk_size=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        moe_shared_expert_intermediate_size=16,
    ),
    "mixtral": lambda: MixtralConfig(**_LLAMA, num_local_experts=4, num_experts_per_tok=4),
    # Two ranks can share their heads.
    "mixtral_heads": lambda: MixtralConfig(
        **_MOE | {"num_key_value_heads": 2}, num_local_experts=4
    ),
    "qwen3_moe_heads": lambda: Qwen3MoeConfig(
        **_MOE | {"num_key_value_heads": 2}, num_experts=4, moe_intermediate_size=16
    ),
    "recurrent_gemma": lambda: RecurrentGemmaConfig(  # states in the module, not in the cache
        **IDS,
        hidden_size=32,
        lru_width=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=48,
        attention_window_size=4,
        w_init_variance_scale=3.0,
    ),
}


def causal_lm(name: str, seed: int = 0, **changes: object) -> torch.nn.Module:
    """A model of that name's config, with ``changes``; biases and norms drawn too, so that a lost
    one shows.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = (CONFIGS | OTHERS)[name]()
        config.update(changes)
        return randomized(AutoModelForCausalLM.from_config(config, dtype=torch.float32))


def score_model(name: str, seed: int = 1) -> torch.nn.Module:
    """The sequence classifier with one label of the same config."""
    config = CONFIGS[name]()
    config.num_labels = 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
        return randomized(model)


def randomized(model: torch.nn.Module) -> torch.nn.Module:
    """Biases and norms are drawn too, so that a lost one shows."""
    # Gemma's norms multiply by 1 + their weights, which start from 0. So do Qwen3.5's, but around
    # 1 its gradients are 76 in the third step, and what rounding does in the first one grows.
    is_gemma = "Gemma" in type(model).__name__
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 or name.endswith("bias"):
            starts_from_0 = is_gemma and not parameter.any()
            centre = 0.0 if name.endswith("bias") or starts_from_0 else 1.0
            parameter.data.normal_(centre, 0.1)
    return model.eval()


def ensure(folder: Path, name: str) -> Path:
    """``folder/name``, made when asked for: a config's name, and perhaps ``_reward``, ``_padeos``,
    ``_reversed`` (another vocabulary); or ``_adapted``, see `adapted`.
    """
    path = folder / name
    if not path.exists() and name.endswith("_adapted"):
        adapted(path, ensure(folder, name.removesuffix("_adapted")))
    elif not path.exists():
        base = name.removesuffix("_padeos").removesuffix("_reversed").removesuffix("_reward")
        model = score_model(base) if "_reward" in name else causal_lm(base)
        if name.endswith("_padeos"):
            model.config.pad_token_id = EOS
        model.save_pretrained(path)
        tokenizer(name.endswith("_padeos"), name.endswith("_reversed")).save_pretrained(path)
    return path


def adapted(path: Path, base: Path) -> None:
    """Write a reward model as PEFT makes it on ``base``: merged into ``path``, the adapter with the
    score head in ``path/adapter``.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        scores = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
        settings = LoraConfig(task_type="SEQ_CLS", r=3, target_modules="all-linear")
        model = get_peft_model(scores, settings)
        for name, parameter in model.named_parameters():
            if ".lora_" in name or ".score." in name:
                parameter.data.normal_(0, 0.3)
    model.save_pretrained(path / "adapter")
    model.merge_and_unload().save_pretrained(path)
    AutoTokenizer.from_pretrained(base).save_pretrained(path)
