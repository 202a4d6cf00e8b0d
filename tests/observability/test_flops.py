"""FLOPs against hand counts and PyTorch's counter; known, or known to be unknown, of every causal
LM of transformers.
"""

import dataclasses
import logging
import warnings
from types import SimpleNamespace

import pytest
import torch
from quick import some
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dschat.models.heads import LanguageModel
from dschat.observability import flops
from dschat.observability.flops import ModelShape
from dschat.rlhf.metrics import throughput

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
PLAIN = {"num_key_value_heads": None, "head_dim": None}  # their configs do not say
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
LATENT = {
    **{"q_lora_rank": 12, "kv_lora_rank": 16, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "first_k_dense_replace": 1},
    **{"moe_intermediate_size": 24, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4},
    "head_dim": 4,
}
COUNTED = {
    "opt": PLAIN
    | {
        "ffn_dim": 40,
        "word_embed_proj_dim": 16,
        "do_layer_norm_before": False,
        "max_position_embeddings": 64,
    },
    "gpt2": PLAIN,
    "bloom": PLAIN,
    "gpt_neox": PLAIN,
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
# q 16x32, k and v 16x16 each, o 32x16; gate, up and down 16x24 each
LLAMA = ModelShape(2, 16, 16 * 32 + 2 * 16 * 16 + 32 * 16 + 3 * 16 * 24, 0, 50, 32, 16, 16)
EXACT = {"llama", "opt", "gpt2", "bloom", "gpt_neox"}
IDS = torch.arange(3, 14).unsqueeze(0)


def config_of(family: str, **sizes):
    given = COUNTED.get(family, {}) | sizes
    return CONFIG_MAPPING[family](**given if family == "gemma3" else SMALL | given)


def tiny_model(family: str, kind=AutoModelForCausalLM, **sizes) -> torch.nn.Module:
    """A randomly initialized model; eager attention, so that every product is visible."""
    config = config_of(family, **sizes)
    return kind.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def generation_flops(prompt_len: int, answer_len: int) -> int:
    prefill = flops.prefill_flops(LLAMA, prompt_len)
    return prefill + flops.decode_flops(LLAMA, prompt_len, answer_len)


def later_keys(shape: ModelShape) -> int:
    """The counter counts all pairs of `IDS`: these of a query with a later key are masked."""
    num_ids = IDS.numel()
    return round(4 * shape.num_layers * shape.query_width) * num_ids * (num_ids - 1) // 2


def counted_flops(run) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


# ---- shapes


def test_shape_of_llama_and_opt_and_gpt2():
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 50}
    assert flops.shape_of(tiny_model("llama", **sizes)) == LLAMA
    assert flops.shape_of(tiny_model("opt")) == ModelShape(
        4, 32, 4 * 32**2 + 2 * 32 * 40, 2 * 16 * 32, 64, 32, 32, embed_dim=16
    )
    assert flops.shape_of(tiny_model("gpt2")) == ModelShape(4, 32, 12 * 32**2, 0, 64, 32, 32, 32)


# ---- FLOPs by hand


def test_generation_by_hand():
    # prompt of 3, answer of 4: inputs are three prompt tokens and three answer tokens
    layer = 2 * (16 * 32 + 16 * 16 + 16 * 16 + 32 * 16 + 3 * 16 * 24)
    pairs = 1 + 2 + 3 + 4 + 5 + 6
    expected = 2 * (6 * layer + 2 * (8 + 8) * 4 * pairs) + 4 * 2 * 16 * 50
    assert generation_flops(3, 4) == expected
    one_token = flops.transformer_flops(LLAMA, 3, head="none") + 2 * 16 * 50
    assert generation_flops(3, 1) == one_token


def test_iteration_by_hand():
    critic = ModelShape(1, 8, 4 * 64 + 2 * 128, 0, 50, 8, 8, 8)

    def actor_forward(tokens: int) -> int:
        return 2 * (tokens * 5376 + 64 * tokens * (tokens + 1)) + tokens * 1600

    def critic_forward(tokens: int) -> int:
        # q, k, v, o 8x8; two MLP matrices 8x16; two heads of 4; a head of one number
        layer = 2 * (4 * 64 + 2 * 128)
        return tokens * layer + 2 * 8 * 2 * tokens * (tokens + 1) // 2 + tokens * 16

    assert flops.transformer_flops(LLAMA, 5) == actor_forward(5)
    phases = flops.rlhf_iteration_flops(
        LLAMA,
        critic,
        critic,
        [3, 3],
        [2, 4],
        ppo_epochs=2,
        critic_gradient_checkpointing=True,
    )
    generate = generation_flops(3, 2) + generation_flops(3, 4)
    score = 2 * (actor_forward(5) + actor_forward(7) + critic_forward(5) + critic_forward(7))
    train_actor = 2 * 3 * (actor_forward(5) + actor_forward(7))
    # recomputation skips the head: 4 passes, minus one of the score head
    train_critic = 2 * 4 * (critic_forward(5) + critic_forward(7)) - 2 * (5 + 7) * 16
    train = train_actor + train_critic
    assert phases == {
        "generate": generate,
        "score": score,
        "train": train,
        "effective": generate + score + train,
    }


def test_iteration_shares_prefill_and_can_skip_the_actor():
    lens = ([4, 4, 6, 6], [1, 5, 2, 3])
    each = flops.rlhf_iteration_flops(LLAMA, LLAMA, LLAMA, *lens)
    shared = flops.rlhf_iteration_flops(LLAMA, LLAMA, LLAMA, *lens, num_samples_per_prompt=2)
    saved = flops.prefill_flops(LLAMA, 4) + flops.prefill_flops(LLAMA, 6)
    assert each["generate"] - shared["generate"] == saved
    assert each["train"] == shared["train"]
    warm_up = flops.rlhf_iteration_flops(LLAMA, LLAMA, LLAMA, *lens, train_actor=False)
    seq_lens = [p + a for p, a in zip(*lens, strict=True)]
    assert warm_up["train"] == sum(flops.training_flops(LLAMA, n, head="score") for n in seq_lens)
    teacher = dataclasses.replace(LLAMA, num_layers=5)
    taught = flops.rlhf_iteration_flops(LLAMA, None, None, *lens, teacher=teacher)
    alone = flops.rlhf_iteration_flops(LLAMA, None, None, *lens)
    passes = sum(flops.transformer_flops(teacher, n) for n in seq_lens)
    assert taught["score"] - alone["score"] == passes


def test_tflops_per_s():
    assert flops.tflops_per_s(6e12, 2.0, num_devices=3) == pytest.approx(1.0)
    assert flops.tflops_per_s(6e12, 0.0) == 0.0


# ---- FLOPs against PyTorch's counter


@pytest.mark.parametrize(
    "family", some(COUNTED, [*sorted(EXACT), "gemma3", "gpt_oss", "qwen2_moe", "deepseek_v3"])
)
def test_forward_and_training_match_the_flop_counter(family):
    """Experts compute the tokens that are routed to them, no others."""
    model = tiny_model(family)
    shape, rel = flops.shape_of(model), 0 if family in EXACT else 0.03
    assert shape is not None
    with torch.no_grad():
        forward = counted_flops(lambda: model(IDS, use_cache=False))
    expected = flops.transformer_flops(shape, IDS.numel()) + later_keys(shape)
    assert forward == pytest.approx(expected, rel=rel)
    training = counted_flops(lambda: model(IDS, use_cache=False).logits.sum().backward())
    expected = flops.training_flops(shape, IDS.numel()) + 3 * later_keys(shape)
    assert training == pytest.approx(expected, rel=rel)


@pytest.mark.parametrize("family", ["llama", "opt", "gpt2"])
def test_gradient_checkpointing_matches_the_flop_counter(family):
    model = tiny_model(family, **{"dropout": 0.0} if family == "opt" else {}).train()
    # transformers 5.23's name for it, or the one before
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})

    def step() -> None:
        # Early stop skips the last product of each layer if its output is not needed.
        with torch.utils.checkpoint.set_checkpoint_early_stop(False):
            model(IDS, use_cache=False).logits.sum().backward()

    shape = flops.shape_of(model)
    expected = flops.training_flops(shape, IDS.numel(), gradient_checkpointing=True)
    assert counted_flops(step) == expected + 4 * later_keys(shape)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_frozen_base_matches_the_flop_counter(family):
    """Frozen matrices above a trainable embedding, as above LoRA's first adapter."""
    model = tiny_model(family)
    shape = flops.shape_of(model)
    # The head is tied to the embedding in GPT-2: give it its own, frozen, matrix.
    head = torch.nn.Linear(shape.hidden, shape.vocab, bias=False)
    model.set_output_embeddings(head)
    model.requires_grad_(False)
    model.get_input_embeddings().weight.requires_grad_(True)
    counted = counted_flops(lambda: model(IDS, use_cache=False).logits.sum().backward())
    expected = flops.training_flops(shape, IDS.numel(), frozen_base=True)
    assert counted == expected + 3 * later_keys(shape)


def test_decode_step_matches_the_flop_counter():
    model = tiny_model("gpt2")
    with torch.no_grad():
        cache = model(IDS[:, :8], use_cache=True).past_key_values
        step = counted_flops(lambda: model(IDS[:, 8:9], past_key_values=cache, use_cache=True))
    # An answer of two tokens takes one step, whose query sees 8 cached keys and its own.
    assert step == flops.decode_flops(flops.shape_of(model), prompt_len=8, answer_len=2)


def test_score_head_matches_the_flop_counter():
    model = tiny_model("opt", AutoModelForSequenceClassification, num_labels=1)
    with torch.no_grad():
        counted = counted_flops(lambda: model(IDS, use_cache=False))
    shape = flops.shape_of(model)
    expected = flops.transformer_flops(shape, IDS.numel(), "score")
    assert counted == expected + later_keys(shape)
    assert shape == flops.shape_of(tiny_model("opt"))


# ---- every family


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
    shape = flops.shape_of(model)
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


@pytest.mark.parametrize("family", ["mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"])
def test_without_attention_only_matrices_count(family):
    model = on_meta(family)
    shape = flops.shape_of(model)
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    assert linears.pop() is model.get_output_embeddings()
    expected = 7 * sum(2 * linear.weight.numel() for linear in linears)
    assert flops.transformer_flops(shape, 7, head="none") == pytest.approx(expected, rel=0.02)


def test_adapters_do_not_count():
    from peft import LoraConfig, get_peft_model

    model = tiny_model("llama")
    before = flops.shape_of(model)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    assert flops.shape_of(adapted.get_base_model()) == before


def test_metrics_without_flops_are_absent_and_say_so_once(caplog):
    """No metric ends a run: a family of which the sizes are not known trains on."""
    model = LanguageModel(on_meta("modernbert-decoder"))
    args = SimpleNamespace(ppo_epochs=1)
    engine = SimpleNamespace(actor=model, critic=None, reward=None, teacher=None, args=args)
    metrics = {f"time/{part}_s": 1.0 for part in ("generate", "score", "train")}
    metrics |= {"rollout/sequences": 2.0, "rollout/tokens": 8.0, "rollout/prompt_length": 3.0}
    with caplog.at_level(logging.INFO, "dschat"):
        for _ in range(2):
            got = throughput(metrics, SimpleNamespace(problem=""), engine, train_actor=True)
    assert got["throughput/train_tokens_per_s"] == 14.0
    assert not any(name.endswith("tflops") for name in got)
    assert caplog.text.count("FLOPs of a ModernBertDecoderForCausalLM are not known") == 1
