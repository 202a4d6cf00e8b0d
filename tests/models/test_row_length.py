"""A row's numbers depend on the row alone: beside longer rows, packed, padded and decoded."""

import logging

import pytest
import torch
from families import POSITIONS, longrope
from own_forward import OTHERS
from quick import each_once, some
from tiny_models import VOCAB, tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DbrxConfig,
    DeepseekV32Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PhimoeConfig,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dschat.chat.model import Model
from dschat.config import UserError
from dschat.inference import EngineConfig, InferenceEngine, SamplingParams
from dschat.inference.generators.hf_generator import HuggingFaceGenerator
from dschat.models.checkpoint import Checkpoint
from dschat.models.heads import LanguageModel
from dschat.models.long_rows import fix_rotary, num_positions, probe_length, restore_rotary
from dschat.models.packing import pack

ORIGINAL = 16
_ROPE = {
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "proportional": {"partial_rotary_factor": 0.5},
}


def rope_config(kind):
    if kind == "longrope":
        return longrope({"original_max_position_embeddings": ORIGINAL})
    plain = longrope({}, original_max_position_embeddings=ORIGINAL).to_dict()
    rope = {"rope_type": kind, "rope_theta": 100.0} | _ROPE[kind]
    return LlamaConfig(**plain | {"rope_parameters": rope, "max_position_embeddings": POSITIONS})


def phimoe():
    rope = rope_config("longrope").rope_parameters
    rope |= {"short_mscale": 1.0, "long_mscale": 1.3}
    sizes = {
        k: v for k, v in rope_config("longrope").to_dict().items() if k in MistralConfig().to_dict()
    }
    del sizes["architectures"], sizes["transformers_version"], sizes["model_type"]
    return PhimoeConfig(**sizes | {"rope_parameters": rope, "num_local_experts": 4})


CONFIGS = {kind: lambda kind=kind: rope_config(kind) for kind in ROPE_INIT_FUNCTIONS}
CONFIGS["phimoe"] = phimoe


@pytest.fixture
def load(tmp_path):
    def load(config, longest_row, dropout=None):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
        options = {"dropout": dropout, "longest_row": longest_row}
        return Checkpoint(tmp_path, "--model").language_model(torch.float32, **options).eval()

    return load


def logprobs(model, rows, packing):
    packed = pack([r for r in rows], [range(len(r) - 1) for r in rows])
    wrapped = LanguageModel(model, packing)
    with torch.no_grad():
        values, _ = wrapped(packed)
    return values.split([len(row) - 1 for row in rows])


@pytest.mark.parametrize(("name", "longest_row"), each_once(CONFIGS, [ORIGINAL, 3 * ORIGINAL]))
def test_a_row_alone_is_the_row_beside_others(name, longest_row, load):
    model = load(CONFIGS[name](), longest_row)
    lengths = [longest_row, 3, ORIGINAL // 2]
    rows = [[(3 + 5 * i + n) % VOCAB for i in range(n)] for n in lengths]
    packs = "auto" if name == "phimoe" else "on"
    alone = [logprobs(model, [row], "off")[0] for row in rows]
    for packing in ("off", packs):
        for one, beside in zip(alone, logprobs(model, rows, packing), strict=True):
            torch.testing.assert_close(beside, one, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", some(CONFIGS, ["longrope", "dynamic", "phimoe"]))
def test_decoding_across_the_original_length_is_what_training_computes(name, load):
    """Keys that were cached before it have the factors of those after it."""
    model = load(CONFIGS[name](), 3 * ORIGINAL)
    prompts = [[5, 6, 7, 8], list(range(2, ORIGINAL))]
    sampling = SamplingParams(max_new_tokens=2 * ORIGINAL, ignore_eos=True)
    generators = [HuggingFaceGenerator(model, (0,), self_check=True)]
    if name not in ("phimoe", "proportional"):  # which the inference engine does not run
        sizes = EngineConfig(max_num_seqs=4, max_seq_len=3 * ORIGINAL)
        engine = InferenceEngine(model.config, torch.float32, torch.device("cpu"), sizes)
        engine.weights.load((n, p.detach()) for n, p in model.named_parameters())
        assert engine.max_seq_len == 3 * ORIGINAL
        generators.append(engine)
    for generator in generators:
        rollout = generator.generate(prompts, sampling)
        for prompt, ids, drawn in zip(prompts, rollout.token_ids, rollout.logprobs, strict=True):
            assert len(ids) == 2 * ORIGINAL
            (values,) = logprobs(model, [prompt + ids], "off")
            values = values[len(prompt) - 1 :]
            torch.testing.assert_close(torch.tensor(drawn), values, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("longest_row", "factors"), [(ORIGINAL, "short"), (40, "long")])
def test_the_longest_row_of_a_run_chooses_the_factors(longest_row, factors, load, caplog):
    """Transformers' own forward of a row that is as long."""
    config = rope_config("longrope")
    with caplog.at_level(logging.INFO, logger="dschat"):
        model = load(config, longest_row)
    said = [r.getMessage() for r in caplog.records if "LongRoPE" in r.getMessage()]
    assert len(said) == (factors == "long")
    theirs = AutoModelForCausalLM.from_config(config).eval()
    theirs.load_state_dict(model.state_dict())
    row = torch.arange(longest_row).unsqueeze(0) % VOCAB
    with torch.no_grad():
        torch.testing.assert_close(model(row).logits, theirs(row).logits)


def test_without_a_run_no_row_is_beyond_the_short_factors(load, tmp_path):
    """Commands that read rows of any length refuse those that would change the others' numbers."""
    config = rope_config("longrope")
    yarn = rope_config("yarn")
    assert (num_positions(config), num_positions(yarn)) == (ORIGINAL, yarn.max_position_embeddings)
    model = load(config, 0)
    generator = HuggingFaceGenerator(model, (0,))
    with pytest.raises(UserError, match=f"exceeds the model's {ORIGINAL} positions"):
        generator.generate([list(range(2, ORIGINAL))], SamplingParams(max_new_tokens=3))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    assert Model.find(str(tmp_path), "fp32").positions == ORIGINAL
    fix_rotary(config, 3 * ORIGINAL)
    assert num_positions(config) == config.max_position_embeddings


def test_the_published_factors_are_saved():
    config = rope_config("longrope")
    published = config.to_dict()
    fix_rotary(config, 3 * ORIGINAL)
    fix_rotary(config, 3 * ORIGINAL)
    assert config.rope_parameters["short_factor"] == published["rope_parameters"]["long_factor"]
    config = AutoConfig.for_model(**config.to_dict())
    restore_rotary(config)
    assert config.to_dict() == published


def test_probes_go_beyond_what_rows_reach():
    assert probe_length(LlamaConfig(), 4096, 5) == 5
    assert probe_length(MistralConfig(sliding_window=100), 4096, 5) == 129
    assert probe_length(MistralConfig(sliding_window=100), 110, 5) == 110
    assert probe_length(MistralConfig(sliding_window=100), 100, 5) == 5


def test_the_self_check_finds_a_window_that_packed_attention_does_not_see(monkeypatch, load):
    """Qwen2-MoE has its window in the mask alone; rows of five tokens do not reach it."""
    monkeypatch.setattr("dschat.models.packing.attention.WINDOW_IN_MASK", ())
    config = OTHERS["qwen2_moe"]()
    config.layer_types = ["sliding_attention"] * 2
    for longest_row, packs in ((6, True), (40, False)):
        wrapped = LanguageModel(load(config, longest_row))
        assert wrapped.packs
        wrapped.check(torch.device("cpu"))
        assert wrapped.packs == packs


def deepseek_v32():
    sizes, names = OTHERS["deepseek"]().to_dict(), DeepseekV32Config().to_dict().keys()
    names -= {"model_type", "architectures", "head_dim", "rope_parameters", "mlp_layer_types"}
    sizes = {name: sizes[name] for name in names & sizes.keys()}
    return DeepseekV32Config(**sizes, index_topk=4, index_head_dim=16, index_n_heads=2)


def test_sparse_selection_is_not_packed(load):
    """Transformers selects keys under the names of its own attention alone."""
    model = load(deepseek_v32(), 40)
    row = [(3 + 5 * i) % VOCAB for i in range(20)]
    with torch.no_grad():
        logits = model(torch.tensor([row])).logits[0, :-1].log_softmax(-1)
    expected = logits.gather(1, torch.tensor(row[1:]).unsqueeze(1))[:, 0]
    wrapped = LanguageModel(model)
    wrapped.check(torch.device("cpu"))
    assert not wrapped.packs
    with torch.no_grad():
        actual = wrapped(pack([row], [range(19)]))[0]
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


def mixtral():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": VOCAB}
    return MixtralConfig(**sizes, router_jitter_noise=0.3)


def noisy_phimoe():
    config = phimoe()
    config.router_jitter_noise = config.input_jitter_noise = 0.3
    return config


def dbrx():
    attn = {"kv_n_heads": 1, "clip_qkv": 8.0, "attn_pdrop": 0.4, "rope_theta": 100.0}
    ffn = {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2, "moe_jitter_eps": 0.3}
    sizes = {"d_model": 32, "n_heads": 2, "n_layers": 2, "max_seq_len": 64, "vocab_size": VOCAB}
    return DbrxConfig(**sizes, attn_config=attn, ffn_config=ffn | {"hidden_size": 32})


@pytest.mark.parametrize("config", [mixtral, noisy_phimoe, dbrx])
def test_routers_draw_no_noise_where_dropout_is_off(config, load):
    model = load(config(), 8, dropout=0.0)
    ids = torch.arange(3, 15).unsqueeze(0)
    with torch.no_grad():
        expected = model(ids).logits
        model.train()
        for _ in range(2):
            torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=1e-6)


def test_no_row_is_longer_than_doges_window():
    """Beyond it, equal tokens tie in its top-k, and the row's length decides between them."""
    checkpoint = Checkpoint("m", "--model")
    checkpoint.config = AutoConfig.for_model("doge", keep_window_size=8, max_position_embeddings=64)
    checkpoint.check_positions(8, "--max_seq_len", "lower it")
    with pytest.raises(UserError, match=r"^--max_seq_len 9: m has 8 positions; lower it$"):
        checkpoint.check_positions(9, "--max_seq_len", "lower it")
