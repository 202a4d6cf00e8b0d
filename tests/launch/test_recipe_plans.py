"""Estimated memory of every recipe on the devices it is for.

Model configurations are written here as published, so no hub is needed.
"""

import dataclasses
from pathlib import Path

import pytest
from transformers import LlamaConfig, OPTConfig, Qwen3Config

import train
from dschat.estimate.report import make_estimator
from dschat.launch import recipe, run_plan

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted(p.stem for p in (ROOT / "training" / "recipes").glob("*.yaml"))
QUICK = {"demo", "demo-dpo"}  # the others take up to a minute each
DEVICE_GIB = 80  # as in the published runs


def opt(hidden, layers, heads, **other):
    sizes = {"hidden_size": hidden, "ffn_dim": 4 * hidden, "word_embed_proj_dim": hidden}
    layout = {"num_hidden_layers": layers, "num_attention_heads": heads}
    return OPTConfig(**sizes | layout | other)


def qwen3(hidden, intermediate, layers, heads, tied):
    return Qwen3Config(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151_936,
        tie_word_embeddings=tied,
        max_position_embeddings=32_768,
    )


def llama_2(**sizes):
    return LlamaConfig(max_position_embeddings=4096, **sizes)


MODELS = {
    "facebook/opt-350m": lambda: opt(
        1024, 24, 16, word_embed_proj_dim=512, do_layer_norm_before=False
    ),
    "facebook/opt-1.3b": lambda: opt(2048, 24, 32),
    "facebook/opt-6.7b": lambda: opt(4096, 32, 32),
    "facebook/opt-13b": lambda: opt(5120, 40, 40),
    "facebook/opt-30b": lambda: opt(7168, 48, 56),
    "facebook/opt-66b": lambda: opt(9216, 64, 72),
    "models/opt-175b": lambda: opt(12_288, 96, 96),
    "meta-llama/Llama-2-7b-hf": llama_2,
    "meta-llama/Llama-2-13b-hf": lambda: llama_2(
        hidden_size=5120, intermediate_size=13_824, num_hidden_layers=40, num_attention_heads=40
    ),
    "codellama/CodeLlama-34b-hf": lambda: llama_2(
        hidden_size=8192,
        intermediate_size=22_016,
        num_hidden_layers=48,
        num_attention_heads=64,
        num_key_value_heads=8,
    ),
    "meta-llama/Llama-2-70b-hf": lambda: llama_2(
        hidden_size=8192,
        intermediate_size=28_672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
    ),
    "meta-llama/Llama-3.1-8B": lambda: LlamaConfig(
        intermediate_size=14_336,
        num_key_value_heads=8,
        vocab_size=128_256,
        max_position_embeddings=131_072,
    ),
    "Qwen/Qwen3-0.6B-Base": lambda: qwen3(1024, 3072, 28, 16, tied=True),
    "Qwen/Qwen3-8B-Base": lambda: qwen3(4096, 12_288, 36, 32, tied=False),
}


def here(name, folder):
    """A folder with the configuration of a hub model; other names unchanged."""
    if name not in MODELS:
        return name
    path = folder / name.replace("/", "_")
    MODELS[name]().save_pretrained(path)
    return str(path)


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in RECIPES]
)
def test_a_recipe_fits_its_devices(name, tmp_path, monkeypatch, gpus_here):
    monkeypatch.chdir(ROOT)
    argv = ["--recipe", name, "--dry_run", "--output_dir", str(tmp_path / "out")]
    if name == "distill":  # the teacher is the result of another run
        argv += ["--teacher_model_name_or_path", "builtin/tiny"]
    config, groups = recipe.parse_args([*argv, "--device_memory_gib", str(DEVICE_GIB)])
    request = train.plan_request(config, run_plan.plan(config, groups, ROOT))
    named = request.base_models
    assert named <= {*MODELS, "builtin/tiny"}
    steps = {
        number: {k: here(v, tmp_path) if k.endswith("model_name_or_path") else v for k, v in given}
        for number, given in ((n, fields.items()) for n, fields in request.steps.items())
    }
    request = dataclasses.replace(request, steps=steps)
    estimator = make_estimator(request)
    for number in request.steps:
        estimate = estimator(request.config(number), request.num_processes)
        assert estimate.fits, (number, estimate)
