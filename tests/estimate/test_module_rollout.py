"""Planned rollouts by blocks with states, by transformers' module, and by the fallback."""

import pytest
import torch
from estimates import estimated, rlhf_fields
from quick import slow
from tiny_models import IDS, LATENT, SMALL
from transformers import AutoConfig, AutoModelForCausalLM

from dschat.inference import EngineConfig, InferenceEngine
from dschat.inference.generators import hf_generator
from dschat.inference.generators.hf_generator import module_engine
from dschat.inference.model.states import RowStates

_SIZES = IDS | SMALL | {"intermediate_size": 48, "num_key_value_heads": 1, "head_dim": 16}
_LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
FAMILIES = {
    "phi": {},
    "exaone4": _LAYERS,
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": LATENT,
    "qwen3_5_text": {  # states beside keys and values
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
}


def planned(name, folder, **knobs):
    config = AutoConfig.for_model(name, **_SIZES | FAMILIES[name])
    config.save_pretrained(folder)
    return config, estimated(rlhf_fields(str(folder)) | knobs).rollout


@pytest.mark.parametrize("name", ["phi", *slow(["exaone4"])])
def test_vllm_holds_a_copy_of_the_weights(name, tmp_path):
    config, rollout = planned(name, tmp_path, rollout_backend="vllm")
    module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert rollout.form.startswith("vLLM on its own copy, TP 1")
    assert rollout.weights == 2 * sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("name", "by"),
    [
        ("phimoe", "module"),
        ("qwen3_5_text", "blocks"),
        *slow([("deepseek_v3", "blocks"), ("phi", "blocks")]),
    ],
)
def test_the_cache_is_that_of_the_engine(name, by, tmp_path):
    config, rollout = planned(name, tmp_path, kv_page_size=8)
    assert rollout.in_engine
    form = "inference engine " + ("on" if by == "blocks" else "with transformers' module on")
    assert rollout.form.startswith(f"{form} training weights")
    assert rollout.weights == 0
    sizes = EngineConfig(max_num_seqs=32, max_seq_len=40, page_size=8)
    if by == "blocks":
        cache = InferenceEngine(config, torch.bfloat16, torch.device("cpu"), sizes).cache
    else:
        module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        cache = module_engine(module, sizes, is_checked=True).cache
    pool = cache.states  # on CUDA steps are captured
    parts = [] if pool is None else [pool, RowStates(pool, num_rows=32)]
    num_bytes = sum(state.nbytes for part in parts for state in part.tensors.values())
    assert rollout.cache == cache.pairs.nbytes + num_bytes


@pytest.mark.parametrize(
    ("name", "knobs"), [("phi", {"enable_hybrid_engine": False}), *slow([("gpt_neo", {})])]
)
def test_the_fallback_caches_the_rows_that_decode_together(name, knobs, tmp_path, monkeypatch):
    monkeypatch.setattr(hf_generator, "MAX_ROWS", 5)
    config, rollout = planned(name, tmp_path, **knobs)
    assert not rollout.in_engine
    assert rollout.form == "transformers' module on training weights"
    if name == "phi":
        keys_and_values = 2 * config.num_hidden_layers * 16 * 2
        assert rollout.cache == 5 * 40 * keys_and_values  # of 40 tokens in 16 bits
        monkeypatch.setattr(hf_generator, "_MAX_TOKENS", 99)
        _, rollout = planned(name, tmp_path, **knobs)
        assert rollout.cache == 2 * 40 * keys_and_values
        monkeypatch.undo()
        _, rollout = planned(name, tmp_path, **knobs)
        assert rollout.cache == 16 * 40 * keys_and_values  # all of a small rollout
