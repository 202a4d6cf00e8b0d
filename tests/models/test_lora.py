"""LoRA: trainable parameters, disabled adapters, and merging against ``merge_and_unload``."""

from itertools import product

import pytest
import torch
from peft.tuners.lora import LoraLayer
from quick import some
from step_cases import probe_logprobs
from tiny_models import causal_lm, score_model
from transformers import AutoConfig, AutoModelForCausalLM

from dschat.config import UserError
from dschat.hybrid.weight_stream import weight_stream
from dschat.models.checkpoint import Checkpoint
from dschat.models.lora import adapters, adapters_off, add_lora, unwrapped_name

ALL = ["all-linear"]
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
FAMILIES = {
    # A dense layer, and one with a shared expert, whose parts PEFT takes for those of experts.
    "deepseek_v3": SIZES
    | {"num_key_value_heads": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    | dict.fromkeys(("q_lora_rank", "kv_lora_rank", "v_head_dim"), 16)
    | dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim"), 8),
    # The fused experts' names are those of other modules: weight.
    "jetmoe": SIZES
    | {
        "num_local_experts": 4,
        "kv_channels": 16,
        "num_key_value_heads": 1,
        "intermediate_size": 16,
    },
    "falcon": SIZES,  # a linear layer with its own forward
}
CPU = torch.device("cpu")


def made(name):
    if name not in FAMILIES:
        return causal_lm(name)
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **FAMILIES[name], initializer_range=0.3)
    return AutoModelForCausalLM.from_config(config)


def with_random_adapters(name="llama", modules=ALL, only=True, alpha=0.0):
    """A tiny PEFT model with random, non-zero B matrices."""
    wrapped = add_lora(made(name), 4, alpha, modules, only, "--lora_modules")
    generator = torch.Generator().manual_seed(0)
    for n, p in wrapped.named_parameters():
        if "lora_B" in n:
            p.data.normal_(0, 0.2, generator=generator)
    return wrapped.eval()


MERGED = ("llama", "llama_tied", "opt", "opt_350m", "gpt2", "bloom", "gpt_neox")
MERGED += ("qwen3_moe", "gpt_oss")  # fused experts, of which PEFT adapts the first by itself
MERGED += tuple(FAMILIES)


@pytest.mark.parametrize(
    ("name", "alpha"),
    some(product(MERGED, [3.0, 0.0]), [("opt_350m", 3.0), ("gpt2", 0.0), ("gpt_oss", 3.0)]),
)
def test_merging_is_what_peft_merges(name, alpha):
    wrapped = with_random_adapters(name, alpha=alpha)
    ours = dict(weight_stream(wrapped, CPU))
    trained = probe_logprobs(wrapped)
    base = made(name)
    moved = [n for n, p in base.named_parameters() if not torch.equal(ours[n], p)]
    assert len(moved) == len(adapters(wrapped))
    theirs = wrapped.merge_and_unload()
    kept = theirs.state_dict()
    names = dict(theirs.named_parameters())
    names |= {n: buffer for n, buffer in theirs.named_buffers() if n in kept}
    assert set(ours) == set(names)
    for n, weight in names.items():
        torch.testing.assert_close(ours[n], weight.data, atol=1e-6, rtol=1e-6)
    assert sum(probe_logprobs(theirs), []) == pytest.approx(sum(trained, []), abs=1e-4)


@pytest.mark.parametrize(
    ("name", "bare"),
    [
        ("deepseek_v3", None),
        ("jetmoe", None),
        ("falcon", None),
        ("nemotron_h", "mixer.conv1d, mixer.gate, mixer.out_proj"),
    ],
)
def test_what_all_linear_leaves_bare(name, bare, caplog):
    with caplog.at_level("INFO", "dschat"):
        with_random_adapters(name)
    assert ("without one" in caplog.text) == (bare is not None)
    assert bare is None or f"without one: {bare}" in caplog.text


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_all_linear_adapts_fused_experts(name, caplog):
    with caplog.at_level("INFO", "dschat"):
        found = adapters(with_random_adapters(name))
    experts = {n for n in found if n.endswith(("experts.gate_up_proj", "experts.down_proj"))}
    assert len(experts) == 4
    assert ("without one: mlp.router" in caplog.text) == (name == "gpt_oss")


def test_experts_are_named_like_layers():
    named = adapters(with_random_adapters("qwen3_moe", ["q_proj", "down_proj"]))
    ends = {name.split(".", 3)[3] for name in named}
    assert ends == {"self_attn.q_proj.weight", "mlp.experts.down_proj"}


def test_adapters_off_is_the_base_and_back():
    wrapped, base = with_random_adapters(), causal_lm("llama")
    flags = {n: p.requires_grad for n, p in wrapped.named_parameters()}
    on = probe_logprobs(wrapped)
    with adapters_off(wrapped):
        assert probe_logprobs(wrapped) == probe_logprobs(base)
        assert {n: p.requires_grad for n, p in wrapped.named_parameters()} == flags
    assert probe_logprobs(wrapped) == on
    assert on != probe_logprobs(base)
    with pytest.raises(ZeroDivisionError), adapters_off(wrapped):
        raise ZeroDivisionError
    assert probe_logprobs(wrapped) == on
    with adapters_off(base):  # a model without adapters
        probe_logprobs(base)


def test_a_new_adapter_changes_nothing():
    wrapped = add_lora(causal_lm("llama"), 4, 0, ALL, True, "--x").eval()
    assert probe_logprobs(wrapped) == probe_logprobs(causal_lm("llama"))


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt_350m"])
def test_what_is_trained(name):
    only = {n for n, p in with_random_adapters(name).named_parameters() if p.requires_grad}
    assert only
    assert all(".lora_" in n for n in only)
    both = with_random_adapters(name, only=False)
    assert all(p.requires_grad for p in both.parameters())
    critic = add_lora(score_model(name), 4, 0, ALL, True, "--x")
    trained = {n for n, p in critic.named_parameters() if p.requires_grad}
    assert [n for n in trained if ".lora_" not in n] == ["base_model.model.score.weight"]
    assert not any("score" in n or "lm_head" in n for n in trained if ".lora_" in n)


def test_chosen_modules_and_scaling():
    wrapped = with_random_adapters(modules=["q_proj", "v_proj"], alpha=6.0)
    layers = adapters(wrapped)
    assert {n.split(".")[-2] for n in layers} == {"q_proj", "v_proj"}
    assert len(layers) == 4
    assert {a.scaling for a in layers.values()} == {1.5}
    unnamed = adapters(with_random_adapters(alpha=0.0))  # default: twice the rank
    assert {a.scaling for a in unnamed.values()} == {2.0}


NO_ADAPTER = "LlamaForCausalLM puts no adapter on a {}; adapters go on down"


@pytest.mark.parametrize(
    ("name", "wanted", "reason"),
    [
        ("llama", "embed_tokens", NO_ADAPTER.format("Embedding")),
        ("llama", "norm", NO_ADAPTER.format("LlamaRMSNorm")),
        ("llama", "mlp", NO_ADAPTER.format("LlamaMLP")),
        ("llama", "nothing_like_it", ""),
        ("opt", "encoder.layers.", ""),
    ],
)
def test_adapters_go_on_linear_layers_alone(name, wanted, reason):
    with pytest.raises(UserError, match=f"^--x {wanted}: {reason}") as raised:
        add_lora(causal_lm(name), 4, 0, ["q_proj", wanted], True, "--x")
    assert "\n" not in str(raised.value)


def test_names():
    assert unwrapped_name("base_model.model.model.layers.0.q.lora_A.default.weight") is None
    inside = unwrapped_name("base_model.model.model.layers.0.q.base_layer.weight")
    assert inside == "model.layers.0.q.weight"
    assert unwrapped_name("model.norm.weight") == "model.norm.weight"


def test_a_part_of_a_path_means_the_linear_layers_below_it(tiny):
    """As DeepSpeed-Chat's scripts name them: ``--actor_lora_module_name decoder.layers.``"""
    wrapped = add_lora(causal_lm("opt"), 2, 0.0, ["decoder.layers."], True, "--lora_modules")
    adapted = {n for n, m in wrapped.named_modules() if isinstance(m, LoraLayer)}
    assert len(adapted) == 2 * 6
    assert all(".decoder.layers." in name for name in adapted)
    name = str(tiny("opt"))
    Checkpoint(name, "--model_name_or_path").check("lm", None, 2, ["decoder.layers."])
