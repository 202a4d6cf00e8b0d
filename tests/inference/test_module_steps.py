"""Captured decode steps of transformers' own module: the same answers without waiting."""

import pytest
import torch
from captures import captured_by, steps_of, use
from families import POSITIONS, assert_same
from quick import some
from soft_graph import operators_only, soft_capture
from test_module_decoder import MOE, SIZES, answers, engine_on, random_module
from transformers import AutoConfig

from dschat.distributed import RankGroup
from dschat.inference import SamplingParams
from dschat.inference.model.module_decoder import module_spec
from dschat.inference.model.module_weights import ModuleWeights
from dschat.models.cpu_matmul import VARIABLE

PROMPTS = [[5], [7, 8, 9, 10, 11, 12, 13], list(range(2, 32)), [20, 21, 22]]

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


@pytest.mark.parametrize("name", some(WAITING, ["gpt_oss", "mixtral"]))
def test_code_that_does_not_wait_computes_the_same(name):
    module, ids = random_module(waiting(name, torch.float32)), torch.arange(2, 22).view(2, -1)
    weights = ModuleWeights(module, module_spec(module), RankGroup())
    with torch.no_grad():
        expected = module(ids).logits
        for _ in range(2):
            with weights.without_waits():
                torch.testing.assert_close(module(ids).logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_moe", "gpt_oss", "qwen3_5_text", "lfm2"])
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
