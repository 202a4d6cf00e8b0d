"""Captured decode steps of transformers' own module: no wait, few operators, the same answers."""

import pytest
import torch
from captures import captured_by, steps_of, use
from fake_cuda import fake_cuda, fake_engine
from fake_steps import PROMPTS, decode_step, operators, waits
from families import EOS, POSITIONS, assert_same
from quick import some
from soft_graph import operators_only, soft_capture
from tiny_models import IDS, SMALL, randomized
from transformers import AutoConfig, AutoModelForCausalLM

from dschat.inference import EngineConfig, InferenceEngine, SamplingParams, UnsupportedModel
from dschat.models.cpu_matmul import VARIABLE

_SIZES = IDS | SMALL | {"intermediate_size": 48, "num_key_value_heads": 1, "head_dim": 16}
_SIZES |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
_MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES = {
    "gemma3_text": {"query_pre_attn_scalar": 16},
    "qwen3_moe": {"moe_intermediate_size": 16, "layer_types": None, **_MOE},
    "gpt_oss": _MOE,
}
# Operators of a layer in 16 bits, with casts and products that training's module does not fuse;
# and around the layers, 107 of them for positions, draws and rows as with the table's decoder.
# gpt-oss's four biases are an operator each where DeepSpeed has replaced torch's linear product.
BUDGETS = {"gemma3_text": (97, 141), "qwen3_moe": (86, 121), "gpt_oss": (80 + 4, 128)}


def config_of(name):
    return AutoConfig.for_model(name, **_SIZES | FAMILIES[name])


@pytest.mark.parametrize("name", some(FAMILIES, ["gpt_oss"]))
def test_a_captured_step_waits_for_nothing(name):
    """Experts too, as grouped products: transformers' loop over them reads which were chosen."""
    config = config_of(name)
    captured, around = decode_step(config, in_module=True, page_size=16)
    per_layer, others = BUDGETS[name]
    assert 0 < operators(captured) <= per_layer * config.num_hidden_layers + others
    assert waits(captured) == 0
    assert around == {}


def test_the_experts_loop_would_read_on_the_host():
    config = config_of("qwen3_moe")
    config._experts_implementation = "eager"
    with fake_cuda() as watch, pytest.raises(UnsupportedModel, match="nonzero"):
        fake_engine(watch, config, in_module=True)


@pytest.mark.parametrize("name", some(FAMILIES, ["gemma3_text"]))
def test_a_frozen_step_computes_the_same(name, monkeypatch):
    """A trace of operators, which holds no number of the host's. Products as on a device: packed
    experts would read which were chosen.
    """
    use(monkeypatch)
    monkeypatch.setenv(VARIABLE, "plain")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = AutoModelForCausalLM.from_config(config_of(name), dtype=torch.float32)
    module = randomized(module).requires_grad_(False)  # a trace would look for gradients
    sizes = EngineConfig(stop_ids=(EOS,), max_num_seqs=4, max_seq_len=POSITIONS, page_size=4)
    with operators_only():
        plain, graphs = (
            InferenceEngine(module.config, torch.float32, torch.device("cpu"), sizes, module=module)
            for _ in range(2)
        )
        captured_by(graphs, soft_capture)
        for seed in range(2):
            sampling = SamplingParams(max_new_tokens=9, seed=seed, n=2)
            rollouts = []
            for made in (plain, graphs):
                with made.weights.in_use():
                    rollouts.append(made.generate(PROMPTS, sampling))
            assert_same(*rollouts)
    assert steps_of(graphs)
