"""Planned memory of long rows: shared by ranks, with activations in host memory."""

from pathlib import Path

import pytest
import yaml
from estimates import estimated, rlhf_fields
from transformers import LlamaConfig

from dschat.config.renamed import translated

RECIPE = Path(__file__).parents[2] / "training/recipes/long-64k.yaml"


@pytest.fixture(scope="module")
def llama_8b(tmp_path_factory):
    folder = tmp_path_factory.mktemp("8b")
    LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=131072,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip
    return str(folder)


@pytest.mark.slow
def test_the_recipe_fits_on_eight_gpus(llama_8b):
    """One row of 64k tokens on 8 ranks: inputs of 32 layers are 2 GiB on each host process."""
    recipe = yaml.safe_load(RECIPE.read_text())
    fields = translated(recipe["common"] | recipe["step3"])
    fields["actor_model_name_or_path"] = llama_8b
    step, _ = estimated(fields, num_processes=8)
    assert step.fits
    training = next(mode for mode in step.modes if mode.name == "training")
    assert training.items["activations"] < 4 * 2**30
    assert step.host["activations"] == pytest.approx(2 * 2**30, rel=0.04)


def test_ranks_share_the_activations(tiny):
    fields = rlhf_fields(tiny("llama")) | {"max_answer_seq_len": 40}
    peaks = []
    for size in (1, 2):
        step, _ = estimated(fields | {"sequence_parallel_size": size}, num_processes=2)
        training = next(mode for mode in step.modes if mode.name == "training")
        peaks.append(training.items["activations"])
    assert peaks[1] == pytest.approx(peaks[0] / 2, rel=0.1)
