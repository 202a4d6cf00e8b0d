"""Architectures that are found in transformers' modules."""

import copy

import pytest
import torch
from families import CONFIGS
from quick import some
from transformers import (
    ApertusConfig,
    Dots1Config,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GraniteConfig,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Ministral3Config,
    MixtralConfig,
    NemotronConfig,
    OPTConfig,
    PhiConfig,
    PhimoeConfig,
    Qwen2MoeConfig,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.llama import modeling_llama

from dschat.inference import InferenceEngine, UnsupportedModel, model_spec
from dschat.inference.model import roles
from dschat.inference.model.decoder import Decoder
from dschat.inference.model.positions import Rotary
from dschat.inference.model.roles import found_spec
from dschat.inference.model.spec import WeightSource
from dschat.inference.model.trial import Trial

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 50}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA = LlamaConfig(**SMALL, **HEADS)


def found(config):
    return found_spec(Trial(config))


def test_numbers_of_a_config_are_measured():
    """Gemma 3 multiplies embeddings by the root of their size and norms by 1 + weight; Granite has
    a number for each sum.
    """
    spec = found(Gemma3TextConfig(**SMALL, **HEADS, head_dim=8, query_pre_attn_scalar=16))
    assert (spec.embed_scale, spec.norm_offset, spec.norm, spec.gated) == (32**0.5, 1, "rmsnorm", 1)
    assert spec.attention_scales == pytest.approx([0.25, 0.25])
    assert spec.activation == "gelu_pytorch_tanh"
    numbers = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22}
    numbers |= {"attention_multiplier": 0.0078125, "logits_scaling": 8.0}
    spec = found(GraniteConfig(**SMALL, **HEADS, **numbers))
    assert (spec.embed_scale, spec.residual_scale, spec.logits_scale) == (12, 0.22, 0.125)
    assert spec.attention_scales == pytest.approx([0.0078125] * 2)


def test_older_families():
    """OPT's positions start at row 2 and its queries are scaled before attention; GPT-2's matrices
    are (in, out) and queries, keys and values are one.
    """
    spec = found(OPTConfig(ffn_dim=48, word_embed_proj_dim=16, num_attention_heads=4, **SMALL))
    assert (spec.position_offset, spec.num_positions, spec.embedding_size) == (2, 2050, 16)
    assert (spec.attention_scales, spec.rotary, spec.activation) == ((), False, "relu")
    spec = found(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50))
    name = "transformer.h.1.attn.c_attn"
    assert WeightSource(f"{name}.weight", "layers.1.qkv.weight", transposed=True) in spec.sources
    assert WeightSource(f"{name}.bias", "layers.1.qkv.bias", transposed=True) in spec.sources
    spec = found(NemotronConfig(**SMALL, **HEADS))
    assert (spec.norm, spec.norm_offset, spec.gated, spec.activation) == (
        "layernorm",
        1,
        0,
        "relu2",
    )
    spec = found(PhiConfig(**SMALL, num_attention_heads=4))
    assert (spec.parallel_residual, spec.partial_rotary) == (True, True)
    assert WeightSource("lm_head.bias", "head.bias") in spec.sources


def test_experts():
    config = GptOssConfig(**SMALL, **HEADS, head_dim=8, num_local_experts=4)
    spec = found(config)
    assert (spec.experts.count, spec.experts.per_token, spec.experts.size) == (4, 4, 48)
    assert (spec.experts.clamped, spec.windows) == ((1.702, 7.0), (128, None))
    target = "layers.1.experts.up.3.weight"
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert WeightSource(name, target, "", True, True, 3) in spec.sources


def test_routers():
    """Of dots.llm1, as DeepSeek-V3's: sigmoid, a correction, groups, a scale, in fp32; Qwen2-MoE's
    is a softmax whose shares do not add up to 1, and its shared expert has a gate.
    """
    groups = {"n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5, "n_shared_experts": 3}
    sizes = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    spec = found(Dots1Config(**SMALL, **HEADS, **groups, **sizes, first_k_dense_replace=1))
    experts = spec.experts
    assert (experts.scoring, experts.corrected, experts.groups) == ("sigmoid", (4,), (2, 1))
    assert (experts.scale, experts.precise, experts.renormalized) == (2.5, True, False)
    assert (experts.size, experts.shared, spec.intermediate_size) == (16, 48, 48)
    experts = found(Qwen2MoeConfig(**SMALL, **HEADS, num_experts=8, norm_topk_prob=False)).experts
    assert (experts.scoring, experts.is_usual, experts.renormalized) == ("softmax", True, False)
    assert experts.shared == 5632
    assert found(CONFIGS["ernie4_5_moe"]()).experts.corrected == (1, 4)


def test_keys_and_values_from_a_latent():
    """DeepSeek-V3's; its latents' norms have an eps of their own."""
    spec = found(CONFIGS["glm4_moe_lite"]())
    latent = spec.latent
    assert (latent.rank, latent.query_rank, latent.rotated) == (12, 20, 6)
    assert (spec.head_size, latent.value_size) == (16, 16)
    assert (spec.norm_eps, latent.eps) == (1e-4, 1e-6)
    assert spec.interleaved_rotary
    assert found(CONFIGS["deepseek_v2"]()).latent.query_rank == 0
    assert not found(CONFIGS["minicpm3"]()).interleaved_rotary


def test_layers_that_carry_states():
    """Jamba's multiplies by the weight of a linear layer itself; its states are in 32 bits where
    transformers keeps them so.
    """
    spec = found(CONFIGS["jamba"]())
    assert set(spec.mixers) == {0, 2}
    assert (spec.num_attending, [spec.place(n) for n in range(3)]) == (1, [0, 0, 1])
    mixer, sources = spec.mixers[0], {s.name: s.target for s in spec.sources}
    assert mixer.linears == {"in_proj", "x_proj", "out_proj"}
    name = "model.layers.0.mamba"
    assert sources[f"{name}.in_proj.weight"] == "layers.0.product.in_proj.weight"
    assert sources[f"{name}.dt_proj.weight"] == "layers.0.mixer.dt_proj_weight.weight"
    assert sources[f"{name}.A_log"] == "layers.0.mixer.A_log.weight"
    found_states = found(CONFIGS["qwen3_5_text"]()).in_dtype(torch.float16).states
    kinds = {(state.kind, state.dtype) for state in found_states}
    assert kinds == {("conv_states", torch.float16), ("recurrent_states", torch.float32)}


def test_gates_behind_attention():
    gates = {name: found(CONFIGS[name]()).gate for name in ("qwen3_5_text", "afmoe", "laguna")}
    assert gates == {
        "qwen3_5_text": ("sigmoid", 12, True),
        "afmoe": ("sigmoid", 12, False),
        "laguna": ("softplus", 1, False),
    }
    assert found(LLAMA).gate is None


def test_norms_of_heads():
    """HunYuan's are behind the rotation, Persimmon's are layer norms: kernels compute neither."""
    spec = found(CONFIGS["hunyuan_v1_dense"]())
    assert (spec.rotates_first, spec.heads_apart) == (True, True)
    spec = found(CONFIGS["persimmon"]())
    assert (spec.rotates_first, spec.heads_apart, spec.norm) == (False, True, "layernorm")
    assert not found(CONFIGS["qwen3"]()).heads_apart
    assert not found(CONFIGS["phi"]()).heads_apart


def test_norms_without_weights_and_other_rotations():
    spec = found(CONFIGS["olmo"]())
    norms = {f"layers.{n}.norm{m}" for n in range(spec.num_layers) for m in (1, 2)}
    assert (spec.bare_norms, spec.norm) == (norms | {"final_norm"}, "layernorm")
    with pytest.raises(UnsupportedModel, match="values are not those of a linear layer"):
        found(CONFIG_MAPPING["olmo"](**SMALL, **HEADS, clip_qkv=0.5))
    bare = CONFIGS["opt"]()
    bare.layer_norm_elementwise_affine = False
    assert found(bare).bare_norms >= {"layers.1.norm2", "final_norm"}
    spec = found(CONFIGS["nanochat"]())
    assert {"embed_norm", "layers.1.q_norm", "final_norm"} <= spec.bare_norms
    assert (spec.norm, spec.backward_rotary, spec.rotates_first) == ("rmsnorm", True, True)
    spec = found(CONFIGS["gptj"]())
    assert (spec.interleaved_rotary, spec.partial_rotary, spec.backward_rotary) == (
        True,
        True,
        False,
    )


def test_published_names():
    """Mixtral's experts, w1, w3 and w2 of each, in a module of another name."""
    sources = set(found(MixtralConfig(**SMALL, **HEADS, num_local_experts=4)).sources)
    mlp, published = "model.layers.1.mlp", "model.layers.1.block_sparse_moe"
    for name, kind, part in (("w1", "up", "gate"), ("w3", "up", "up"), ("w2", "down", "")):
        tensor = f"{published}.experts.3.{name}.weight"
        stack = f"{mlp}.experts.{'gate_up' if kind == 'up' else 'down'}_proj"
        target = f"layers.1.experts.{kind}.3.weight"
        assert WeightSource(tensor, target, part, instead=stack) in sources
    gate = f"{published}.gate.weight", "layers.1.router.weight"
    assert WeightSource(*gate, instead=f"{mlp}.gate.weight") in sources


def test_published_checkpoints_with_other_tensors_are_read_by_the_module(monkeypatch, tmp_path):
    config = LlamaConfig(**SMALL | {"vocab_size": 53}, **HEADS)
    monkeypatch.setattr(roles, "published_sources", lambda *_: None)
    assert not found(config).reads_published
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="has other tensors on disk"):
        InferenceEngine.from_pretrained(tmp_path)


def test_queries_that_grow_are_seen_beyond_the_original_length():
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "llama_4_scaling_beta": 0.1}
    rope |= {"original_max_position_embeddings": 64}
    config = Ministral3Config(**SMALL, **HEADS, max_position_embeddings=256, rope_parameters=rope)
    assert found(config).query_growth == (0.1, 64)


def test_a_large_model_takes_no_memory():
    """As wide as one of 70 billion weights."""
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "vocab_size": 128256}
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8}
    config = LlamaConfig(**sizes, **heads, num_hidden_layers=8)
    trial = Trial(config)
    tensors = trial.model.state_dict().values()
    held = sum(x.untyped_storage().nbytes() for x in tensors if x.device.type == "cpu")
    assert held < 100 << 20
    spec = found_spec(trial)
    assert len(spec.sources) == 8 * 9 + 3  # q, k, v, o, gate, up, down, two norms
    assert (spec.vocab_size, spec.intermediate_size) == (128256, 28672)


def test_nothing_else_changes():
    """Neither the draws of a run nor the config."""
    config = copy.deepcopy(LLAMA)
    torch.manual_seed(3)
    before, values = torch.get_rng_state(), config.to_dict()
    found(config)
    assert torch.equal(torch.get_rng_state(), before)
    assert config.to_dict() == values


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (PhimoeConfig(**SMALL, **HEADS), "its experts are chosen in another way"),
        (ApertusConfig(**SMALL, **HEADS), "neither act"),
    ],
    ids=["router", "learned activation"],
)
def test_what_the_decoder_does_not_compute(config, reason):
    with pytest.raises(UnsupportedModel, match=reason):
        model_spec(config)


CHANGES = {
    "MLP": (modeling_llama.LlamaMLP, "forward", lambda y: 1.001 * y),
    "layer": (modeling_llama.LlamaDecoderLayer, "forward", lambda y: 1.001 * y),
    "norm": (modeling_llama.LlamaRMSNorm, "forward", lambda y: y + 0.01),
    "keys": (modeling_llama, "apply_rotary_pos_emb", lambda qk: (qk[0], 1.001 * qk[1])),
    "queries": (modeling_llama, "apply_rotary_pos_emb", lambda qk: (qk[0] + 0.01, qk[1])),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_module_that_computes_more_is_not_taken_for_a_known_one(name, monkeypatch):
    owner, attribute, change = CHANGES[name]
    original = getattr(owner, attribute)
    monkeypatch.setattr(owner, attribute, lambda *args, **named: change(original(*args, **named)))
    with pytest.raises(UnsupportedModel):
        found(LLAMA)


def test_a_weight_without_a_role_is_named(monkeypatch):
    made = modeling_llama.LlamaMLP.__init__

    def with_more(self, config):
        made(self, config)
        self.extra = torch.nn.Linear(3, 3)

    monkeypatch.setattr(modeling_llama.LlamaMLP, "__init__", with_more)
    with pytest.raises(UnsupportedModel, match=r"layers\.0\.mlp\.extra\.weight has no role"):
        found(LLAMA)


@pytest.mark.parametrize("part", ["layer", "embed", "finish", "logits"])
def test_the_decoder_itself_is_tried(part, monkeypatch):
    original = getattr(Decoder, part)

    def changed(*args, **kwargs):
        result = original(*args, **kwargs)
        return (result[0], 2 * result[1]) if part == "layer" else 2 * result

    monkeypatch.setattr(Decoder, part, changed)
    with pytest.raises(UnsupportedModel, match="decoder"):
        found(LLAMA)


@pytest.mark.parametrize("name", some(CONFIGS, ["glm4", "olmo3"]))
def test_rotary_positions_are_tried(name, monkeypatch):
    """Of each family that has them."""
    config = CONFIGS[name]()
    if name.startswith("bloom") or not found(config).rotary:
        pytest.skip("no rotary positions")

    def turned(self, positions):
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1) / 2

    monkeypatch.setattr(Rotary, "rows", turned)
    with pytest.raises(UnsupportedModel, match="rotary"):
        found(config)


def test_models_that_would_take_long_to_try_are_not_run():
    with pytest.raises(UnsupportedModel, match="Llama4TextExperts has large weights"):
        Trial(Llama4TextConfig())


def test_what_a_module_raises_is_a_reason(monkeypatch, caplog):
    """And transformers' warnings about its config are not repeated."""

    def forward(*_, **__):
        raise AssertionError("of its own")

    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=51)
    caplog.clear()
    model_spec(config)
    assert not caplog.records
    monkeypatch.setattr(GPT2LMHeadModel, "forward", forward)
    config.vocab_size = 52
    with pytest.raises(UnsupportedModel, match="gpt2: of its own"):
        model_spec(config)
