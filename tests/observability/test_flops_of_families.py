"""FLOPs of every causal LM of transformers: known, or known to be unknown; never an error."""

import logging
import warnings
from types import SimpleNamespace

import pytest
import torch
from quick import some
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dschat.observability.flops import shape_of, training_flops, transformer_flops

# A byte transformer without a depth; a decoder that transformers does not name.
UNKNOWN = {"blt", "modernbert-decoder"}
# Composite configs, sizes per layer, no attention: each of them once ended a run.
ODD = (
    *("blt", "dots3_note", "emu3", "falcon_mamba", "fuyu", "gemma3", "gemma3n_text", "gemma4"),
    *("gemma4_unified", "got_ocr2", "llama4", "mamba2", "mllama", "qwen3_5", "qwen3_5_moe", "rwkv"),
)
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROUTED = {"num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 24}
VISION = {"num_hidden_layers": 2, "hidden_size": 48, "image_size": 28}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
LATENT = {
    **{"q_lora_rank": 12, "kv_lora_rank": 16, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "first_k_dense_replace": 1},
    **{"moe_intermediate_size": 24, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4},
    "head_dim": 4,
}
COUNTED = {
    "llama": {},
    "qwen3": {},
    "phi3": {},
    "gemma2": {},
    "gemma3_text": {},
    "gemma3": {"text_config": SMALL, "vision_config": VISION},
    "gemma4_text": {
        "num_global_key_value_heads": 1,
        "global_head_dim": 16,
        "vocab_size_per_layer_input": 64,  # else a table of 268M numbers
    },
    "mixtral": EXPERTS,
    "qwen2_moe": ROUTED | {"shared_expert_intermediate_size": 20},
    "qwen3_moe": ROUTED,
    "olmoe": ROUTED,
    "gpt_oss": EXPERTS,
    "granitemoe": EXPERTS,
    "deepseek_v3": LATENT,
    "glm4_moe": LATENT | {"head_dim": 8},
}


def config_of(family: str, **sizes):
    if family == "gemma3":
        config = CONFIG_MAPPING[family](**sizes)
    else:
        config = CONFIG_MAPPING[family](**SMALL | sizes)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    return config


def on_meta(family: str):
    """None where transformers cannot build the family from its default config."""
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        try:
            return AutoModelForCausalLM.from_config(CONFIG_MAPPING[family]())
        except Exception:
            return None


def check_shape(family: str) -> None:
    model = on_meta(family)
    if model is None:
        return
    shape = shape_of(model)
    assert (shape is None) == (family in UNKNOWN), family
    if shape is not None:
        matrices = shape.num_layers * shape.layer_weights + shape.outer_weights
        assert 0 < matrices < 2 * model.num_parameters(), family  # Zamba uses layers twice


@pytest.mark.parametrize("family", some(ODD, ["gemma3n_text", "mamba2", "qwen3_5", "rwkv"]))
def test_odd_families_have_a_shape_or_are_unknown(family):
    check_shape(family)


@pytest.mark.slow
def test_every_family_has_a_shape_or_is_unknown():
    families = [f for f in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if f in CONFIG_MAPPING]
    assert len(families) > 150
    for family in families:
        check_shape(family)


@pytest.mark.parametrize(
    "family", some(COUNTED, ["llama", "gemma3", "gpt_oss", "qwen2_moe", "deepseek_v3"])
)
def test_a_family_matches_the_flop_counter(family):
    """PyTorch's counter; experts compute the tokens that are routed to them, no others."""
    model = AutoModelForCausalLM.from_config(config_of(family, **COUNTED[family])).eval()
    ids = torch.arange(3, 14).unsqueeze(0)
    shape = shape_of(model)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False).logits.sum().backward()
    assert shape is not None
    expected = training_flops(shape, ids.numel(), causal=False)
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("family", ["mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"])
def test_without_attention_only_matrices_count(family):
    model = on_meta(family)
    shape = shape_of(model)
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    assert linears.pop() is model.get_output_embeddings()
    expected = 7 * sum(2 * linear.weight.numel() for linear in linears)
    assert transformer_flops(shape, 7, head="none") == pytest.approx(expected, rel=0.02)


def test_a_reward_model_has_its_policy_s_shape():
    config = config_of("qwen3")
    config.num_labels = 1
    policy = AutoModelForCausalLM.from_config(config)
    assert shape_of(AutoModelForSequenceClassification.from_config(config)) == shape_of(policy)


def test_adapters_do_not_count():
    from peft import LoraConfig, get_peft_model

    model = AutoModelForCausalLM.from_config(config_of("llama"))
    before = shape_of(model)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    assert shape_of(adapted.get_base_model()) == before


def test_metrics_without_flops_are_absent_and_say_so_once(monkeypatch, caplog):
    """No metric ends a run: a family of which the sizes are not known trains on."""
    from dschat.models.heads import LanguageModel
    from dschat.rlhf.metrics import throughput

    model = LanguageModel(AutoModelForCausalLM.from_config(config_of("llama")))
    monkeypatch.setattr(type(model.base.config), "num_hidden_layers", None, raising=False)
    del model.base.config.__dict__["num_hidden_layers"]
    args = SimpleNamespace(ppo_epochs=1)
    engine = SimpleNamespace(actor=model, critic=None, reward=None, teacher=None, args=args)
    metrics = {f"time/{part}_s": 1.0 for part in ("generate", "score", "train")}
    metrics |= {"rollout/sequences": 2.0, "rollout/tokens": 8.0, "rollout/prompt_length": 3.0}
    with caplog.at_level(logging.INFO, "dschat"):
        for _ in range(2):
            got = throughput(metrics, SimpleNamespace(problem=""), engine, train_actor=True)
    assert got["throughput/train_tokens_per_s"] == 14.0
    assert not any(name.endswith("tflops") for name in got)
    assert caplog.text.count("FLOPs of a LlamaForCausalLM are not known") == 1
