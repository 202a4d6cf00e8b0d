"""Captured decode steps of transformers' own module: no wait, few operators, the same answers."""

from collections import Counter

import pytest
import torch
import transformers
from captures import captured_by, steps_of, use
from fake_cuda import fake_cuda, fake_engine
from fake_steps import PROMPTS, SAMPLED, decode_step, operators, waits
from families import POSITIONS, assert_same
from packaging import version
from quick import some
from soft_graph import operators_only, soft_capture
from test_module_decoder import MOE, SIZES, answers, config_of, engine_on, random_module
from transformers import AutoConfig

from dschat.distributed import RankGroup
from dschat.inference import SamplingParams, UnsupportedModel
from dschat.inference.model.module_decoder import module_spec
from dschat.inference.model.module_weights import ModuleWeights
from dschat.models.cpu_matmul import VARIABLE

# Operators of a layer in 16 bits, with casts and products that training's module does not fuse;
# and around the layers, 107 of them for positions, draws and rows as with our decoder.
# gpt-oss's four biases are an operator each where DeepSpeed has replaced torch's linear product.
BUDGETS = {"gemma3_text": (97, 141), "qwen3_moe": (86, 121), "gpt_oss": (80 + 4, 128)}
BUDGETS |= {"qwen3_5_text": (82, 140), "lfm2": (42, 141)}


# Families whose own code would wait in each step: for the numbers of rows of each expert, where
# torch has no grouped product; for constants that are copied; for the longest row, on which rotary
# scalings depend.
_SCALED = {"rope_theta": 1e4, "factor": 2.0}
_LONG = {"short_factor": [1.0] * 8, "long_factor": [9.0] * 8, **_SCALED}
WAITING = {
    "mixtral": MOE,
    "gpt_oss": MOE,  # transposed, interleaved and biased
    "gemma3n_text": {"activation_sparsity_pattern": [0.95, 0.0], "num_kv_shared_layers": 0},
    "phimoe": MOE,
    "phi3": {
        "rope_parameters": {"rope_type": "longrope", **_LONG},
        "original_max_position_embeddings": POSITIONS,
    },
    "llama": {"rope_parameters": {"rope_type": "dynamic", **_SCALED}},
}


def waiting(name, dtype):
    sizes = SIZES | {"sliding_window": 6, "pad_token_id": 0} | WAITING[name]
    return AutoConfig.for_model(name, **sizes, dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("name", BUDGETS)
def test_a_captured_step_waits_for_nothing(name):
    """Experts too, as grouped products: transformers' loop over them reads which were chosen."""
    config = config_of(name)
    captured, around = decode_step(config, in_module=True, page_size=16)
    per_layer, others = BUDGETS[name]
    if version.parse(transformers.__version__) < version.parse("5.18"):
        per_layer += 5  # for masks of other ranks' experts, of which there are none
    assert 0 < operators(captured) <= per_layer * config.num_hidden_layers + others
    assert waits(captured) == 0
    assert around == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "gpu"),
    [(torch.float32, 9), (torch.bfloat16, 9), (torch.bfloat16, 8), (torch.float16, 8)],
    ids=str,
)
@pytest.mark.parametrize("name", WAITING)
def test_code_that_would_wait_does_not(name, dtype, gpu, monkeypatch):
    with fake_cuda() as watch:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (gpu, 0))
        made = fake_engine(watch, waiting(name, dtype), dtype, in_module=True)
        made.generate(PROMPTS, SAMPLED)
    captured = Counter({key: n for (inside, key), n in watch.counts.items() if inside})
    assert operators(captured) > 0
    assert waits(captured) == 0


@pytest.mark.parametrize("name", some(WAITING, ["gpt_oss", "mixtral"]))
def test_code_that_does_not_wait_computes_the_same(name):
    module, ids = random_module(waiting(name, torch.float32)), torch.arange(2, 22).view(2, -1)
    weights = ModuleWeights(module, module_spec(module), RankGroup())
    with torch.no_grad():
        expected = module(ids).logits
        for _ in range(2):
            with weights.without_waits():
                torch.testing.assert_close(module(ids).logits, expected, rtol=1e-4, atol=1e-5)


def test_the_experts_loop_would_read_on_the_host():
    config = config_of("qwen3_moe", experts_implementation="eager")
    with fake_cuda() as watch, pytest.raises(UnsupportedModel, match="nonzero"):
        fake_engine(watch, config, in_module=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", BUDGETS)
def test_a_frozen_step_computes_the_same(name, monkeypatch):
    """A trace of operators, which holds no number of the host's. Products as on a device: packed
    experts would read which were chosen.
    """
    use(monkeypatch)
    monkeypatch.setenv(VARIABLE, "plain")
    module = random_module(name).requires_grad_(False)  # a trace would look for gradients
    with operators_only():
        plain, graphs = (engine_on(module, max_num_seqs=4, page_size=4) for _ in range(2))
        captured_by(graphs, soft_capture)
        for seed in range(2):
            sampling = SamplingParams(max_new_tokens=9, seed=seed, n=2)
            assert_same(*(answers(made, sampling, PROMPTS) for made in (plain, graphs)))
    assert steps_of(graphs)
