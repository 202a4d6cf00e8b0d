"""User errors: one line that names the cause, before anything is computed."""

import json
from contextlib import contextmanager

import pytest
import torch
from captures import assert_idle, on_graphs, use
from fake_cuda import fake_cuda
from families import CONFIGS, POSITIONS, VOCAB, cache_gib, empty_engine, engine
from safetensors.torch import load_file, save_file
from transformers import CodeGenConfig, CodeGenForCausalLM

from dschat.config import UserError
from dschat.distributed import RankGroup
from dschat.inference import InferenceEngine, SamplingParams, UnsupportedModel
from dschat.inference.generators.engine_config import require_current
from dschat.inference.requests.decode_state import DecodeState
from dschat.inference.requests.sampler import Sampler
from dschat.inference.requests.sequence import Request

SAMPLING = SamplingParams(max_new_tokens=10)


@contextmanager
def refused(message, error=UserError):
    """A scope that raises ``error``, a `UserError`, of one line that ``message`` matches."""
    with pytest.raises(error, match=message) as raised:
        yield raised
    assert isinstance(raised.value, UserError)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[1], []], "prompt 1 is empty"),
        ([[1], [2], [3, VOCAB]], f"prompt 2 has the id {VOCAB}, outside the vocabulary of {VOCAB}"),
        ([[3, -1]], "prompt 0 has the id -1, outside the vocabulary"),
        ([[1], [1] * 55], f"prompt 1 has 55 tokens; with 10 new ones that exceeds .*{POSITIONS}"),
    ],
)
def test_prompts_that_cannot_be_answered(prompts, message, module_of):
    made = engine(module_of("llama"))
    with refused(message):
        made.generate(prompts, SAMPLING)
    with refused(message.split(" ", 2)[2]):
        next(made.stream(prompts[-1], SAMPLING))
    with refused(message.split(" ", 2)[2]):
        made.core().add(Request(prompts[-1], SAMPLING))
    assert made.cache.num_free == made.cache.num_pages
    assert len(made.generate([[1]], SAMPLING)) == 1  # the engine still works


@pytest.mark.parametrize("page_size", [4, 16])
def test_a_prompt_longer_than_the_cache_can_ever_hold(page_size, module_of):
    module = module_of("llama")
    gib = cache_gib(engine(module), 48)
    made = engine(module, page_size=page_size, kv_cache_gib=gib)
    message = "prompt 1 has 39 tokens; with 10 new ones that exceeds the KV cache .* kv_cache_gib"
    with refused(message):
        made.generate([[1], [1] * 39], SAMPLING)
    assert len(made.generate([[1], [1] * 38], SAMPLING)) == 2  # 48 tokens fit exactly


@pytest.mark.parametrize("gib", [0, -1, 1e-9])
def test_a_cache_without_a_page(gib, module_of):
    with refused("is smaller than a page of 32 tokens .* raise kv_cache_gib"):
        engine(module_of("llama"), kv_cache_gib=gib)


@pytest.mark.parametrize(
    ("name", "size", "what", "change"),
    [
        ("llama", 3, "4 attention heads", {}),
        ("llama", 4, "2 key-value heads", {}),
        ("bloom", 4, "6 attention heads", {}),
        ("gpt2_inverse_layer", 16, "4 attention heads", {}),
        ("llama", 2, "47 MLP columns", {"intermediate_size": 47}),
        ("qwen3_moe", 2, "17 expert columns", {"moe_intermediate_size": 17}),
    ],
)
def test_tensor_parallel_sizes_that_do_not_divide(name, size, what, change):
    group, config = RankGroup(), CONFIGS[name]()
    group.size = size
    config.update(change)
    with refused(f"--inference_tp_size {size} does not divide the model's {what}"):
        empty_engine(config, group=group)


def without(name):
    return lambda state: state.pop(name)


def with_tensor(name, *shape):
    return lambda state: state.update({name: torch.ones(shape)})


UP, NORM = "model.layers.1.mlp.up_proj.weight", "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(UP), f"the weights lack {UP}$"),
        (lambda state: [state.pop(UP), state.pop(NORM)], f"the weights lack {UP} and 1 more"),
        (with_tensor("model.layers.2.mlp.up_proj.weight", 2), "contain model.layers.2.mlp.up_proj"),
        (with_tensor(NORM, 31), rf"contain {NORM} in shape \(31,\) instead of \(32,\)"),
        (with_tensor(UP, 32, 48), rf"contain {UP} in shape \(32, 48\) instead of \(48, 32\)"),
        (with_tensor("model.layers.0.self_attn.q_proj.bias", 32), "q_proj.bias, which the model"),
    ],
    ids=["missing", "two missing", "extra layer", "wrong shape", "transposed", "extra bias"],
)
def test_checkpoints_of_another_model(change, message, module_of, tmp_path):
    module_of("llama").save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    change(state)
    save_file(state, tmp_path / "model.safetensors")
    with refused(message) as error:
        InferenceEngine.from_pretrained(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_families_whose_parts_are_not_found(tmp_path):
    config = CodeGenConfig(vocab_size=64, n_embd=32, n_layer=1, n_head=4, rotary_dim=8)
    CodeGenForCausalLM(config).save_pretrained(tmp_path)
    with refused("CodeGenForCausalLM: values are not those of a linear", UnsupportedModel):
        InferenceEngine.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gpt2", {"add_cross_attention": True}, "crossattention.c_attn.weight has no role"),
        ("qwen2", {"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
        ("llama", {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1.0}}, "spiral"),
    ],
)
def test_variants_the_decoder_does_not_have(name, change, message):
    config = CONFIGS[name]()
    config.update(change)
    with refused(message, UnsupportedModel):
        empty_engine(config)


@pytest.mark.parametrize(
    ("make", "owner", "name"),
    [
        (engine, Sampler, "draw"),
        (on_graphs, DecodeState, "advance"),
        (on_graphs, DecodeState, "read"),
    ],
    ids=["eager", "captured step", "read"],
)
def test_an_error_in_the_middle_leaves_the_cache_clean(make, owner, name, module_of, monkeypatch):
    """A step fails while sequences of three prompts hold pages; the next call starts from none."""
    use(monkeypatch)
    made = make(module_of("llama"), page_size=4, max_num_seqs=3)
    prompts, sampling = [[5], [6] * 9, [7] * 20, [8] * 3], SamplingParams(max_new_tokens=12, n=3)
    expected = made.generate(prompts, sampling)
    method, free = getattr(owner, name), []

    def fails_at_the_fifth(*arguments):
        free.append(made.cache.num_free)
        if len(free) == 5:
            raise RuntimeError("out of memory")
        return method(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fails_at_the_fifth)
        with pytest.raises(RuntimeError, match="out of memory"):
            made.generate(prompts, sampling)
    assert free[-1] < made.cache.num_pages
    assert_idle(made)
    made.forget_prefixes()  # which the same log-probs to the bit do without
    assert made.generate(prompts, sampling) == expected


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"indices": [1, 2]}, "2 indices for 1 prompts"),
        ({"max_new_tokens": []}, "0 max_new_tokens for 1 prompts"),
        ({"max_new_tokens": [0]}, "max_new_tokens 0 of prompt 0 must be at least 1"),
    ],
)
def test_lists_that_do_not_fit_the_prompts(arguments, words, module_of):
    made = engine(module_of("llama"))
    with refused(words):
        made.generate([[3, 4]], SamplingParams(max_new_tokens=4), **arguments)


@pytest.mark.parametrize("stop", [999, -1])
def test_a_stop_token_outside_the_vocabulary_is_never_drawn(stop, module_of):
    sampling = SamplingParams(max_new_tokens=6, min_new_tokens=3, stop_token_ids=(stop,))
    rollout = engine(module_of("llama")).generate([[3, 4]], sampling)
    assert stop not in rollout.token_ids[0]


@pytest.mark.parametrize("device", ["cuda", "gpu"])
def test_a_device_that_is_not_there(device, tmp_path):
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is one")
    with refused(f"device {device}"):
        InferenceEngine.from_pretrained(tmp_path, device=device)


def test_a_stream_is_one_answer(module_of):
    with refused("n 2: a stream is one answer"):
        next(engine(module_of("llama")).stream([3], SamplingParams(n=2)))


def test_a_checkpoint_with_code_of_its_own(tmp_path):
    auto = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnLM"}
    config = CONFIGS["llama"]().to_dict() | {"model_type": "own_thing", "auto_map": auto}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text("raise AssertionError('it ran')")
    with refused("needs its own Python code", UnsupportedModel):
        InferenceEngine.from_pretrained(tmp_path)


def test_another_gpu_than_the_current_one_is_refused():
    """Its graphs would be captured on a stream of the current one: an empty graph, wrong tokens."""
    with fake_cuda():
        with refused(r"^device cuda:1 .* torch.cuda.set_device\(1\) first"):
            InferenceEngine(CONFIGS["llama"](), torch.float32, torch.device("cuda:1"))
        for device in ("cuda", "cuda:0", "cpu"):
            require_current(torch.device(device))


def test_an_engine_on_a_cpu_asks_for_no_gpu(monkeypatch):
    """A CUDA build of torch raises where there is none, as on most laptops; another one always."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    require_current(torch.device("cpu"))
    InferenceEngine(CONFIGS["llama"](), torch.float32, torch.device("cpu"))
