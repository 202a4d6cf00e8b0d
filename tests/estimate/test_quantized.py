"""Planned memory of quantized weights: that of the loaded ones; and of recipes for given GPUs."""

from pathlib import Path

import pytest
import torch
import yaml
from estimates import estimated, rlhf_fields
from quick import slow
from tiny_models import ensure
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from dschat.config.renamed import translated
from dschat.estimate.devices import GIB
from dschat.models.checkpoint import Checkpoint

RECIPES = Path(__file__).parents[2] / "training/recipes"


def held_bytes(model):
    """Bytes of the weights of a loaded model, with their scales."""
    total = 0
    for parameter in model.parameters():
        total += parameter.nbytes
        if (state := getattr(parameter, "quant_state", None)) is not None:
            total += state.absmax.nbytes + state.state2.absmax.nbytes
    return total


@pytest.mark.parametrize("bits", [4, *slow([8])])
def test_planned_weights_are_those_loaded(bits, tmp_path):
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, vocab_size=64)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    loaded = Checkpoint(tmp_path, "--model").language_model(torch.bfloat16, weight_bits=bits)
    fields = {f"load_in_{bits}bit": ["actor"], "actor_lora_dim": 4}
    step = estimated(rlhf_fields(str(tmp_path)) | fields)
    adapters = step.present[0].sizes.trained
    planned = step.modes[0].items["actor weights"] - 2 * adapters
    assert planned == pytest.approx(held_bytes(loaded), rel=0.005)


def test_the_rollout_reads_training_weights_unless_told(tmp_path):
    fields = rlhf_fields(ensure(tmp_path, "llama")) | {"actor_lora_dim": 4}
    quantized = {"load_in_4bit": ["actor"]}
    for knobs, weights in ((quantized, 0), (quantized | {"rollout_layout": "copy"}, 2)):
        step = estimated(fields | knobs)
        whole = step.present[0].sizes.total - step.present[0].sizes.trained
        assert step.rollout.weights == weights * whole


def recipe_fields(name):
    """Those of step 3."""
    recipe = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())
    return translated(recipe["common"] | recipe["step3"])


def saved(folder, config_class, hidden, inner, layers, heads, **more):
    config = config_class(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=8, **more,
        architectures=[config_class.__name__.replace("Config", "ForCausalLM")],
    )  # fmt: skip
    config.save_pretrained(folder)
    return str(folder)


@pytest.mark.slow
def test_the_recipe_fits_on_24_gib(tmp_path):
    """8.19B weights, as Qwen3-8B has: 6.95B of its linear layers at 0.516 bytes, 1.24B at 2."""
    fields, more = recipe_fields("qlora-8b-24gb"), {"head_dim": 128, "vocab_size": 151936}
    for model, sizes in {
        "actor": (4096, 12288, 36, 32),
        "reward": (1024, 3072, 28, 16),
    }.items():
        folder, tied = tmp_path / model, {"tie_word_embeddings": model == "reward"}
        fields[f"{model}_model_name_or_path"] = saved(folder, Qwen3Config, *sizes, **more, **tied)
    step = estimated(fields, gib=24)
    adapters = 2 * step.present[0].sizes.trained / GIB
    assert step.modes[0].items["actor weights"] / GIB - adapters == pytest.approx(5.66, abs=0.02)
    assert step.fits
    assert step.peak.total < 0.9 * step.device.memory


@pytest.mark.slow
def test_the_recipe_of_long_rows_fits_on_eight_gpus(tmp_path):
    """One row of 64k tokens on 8 ranks: inputs of 32 layers are 2 GiB on each host process."""
    more = {"vocab_size": 128256, "max_position_embeddings": 131072}
    llama_8b = saved(tmp_path, LlamaConfig, 4096, 14336, 32, 32, **more)
    fields = recipe_fields("long-64k") | {"actor_model_name_or_path": llama_8b}
    step = estimated(fields, num_processes=8)
    assert step.fits
    training = next(mode for mode in step.modes if mode.name == "training")
    assert training.items["activations"] < 4 * 2**30
    assert step.host["activations"] == pytest.approx(2 * 2**30, rel=0.04)
