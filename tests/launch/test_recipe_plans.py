"""Estimated memory of every recipe on the devices it is for.

Model configurations are written here as published, so no hub is needed.
"""

import dataclasses

import pytest
from python_process import ROOT
from transformers import LlamaConfig, OPTConfig, Qwen3Config

import train
from dschat.estimate.report import make_estimator
from dschat.launch import recipe, run_plan

RECIPES = sorted(p.stem for p in (ROOT / "training" / "recipes").glob("*.yaml"))
QUICK = {"demo", "demo-dpo"}  # the others take up to a minute each
DEVICE_GIB = 80  # as in the published runs


# hidden size, layers, heads
OPT = {
    "facebook/opt-350m": (1024, 24, 16),
    "facebook/opt-1.3b": (2048, 24, 32),
    "facebook/opt-6.7b": (4096, 32, 32),
    "facebook/opt-13b": (5120, 40, 40),
    "facebook/opt-30b": (7168, 48, 56),
    "facebook/opt-66b": (9216, 64, 72),
    "models/opt-175b": (12_288, 96, 96),
}
# hidden and intermediate size, layers, heads, key-value heads
LLAMA = {
    "meta-llama/Llama-2-7b-hf": (4096, 11_008, 32, 32, 32),
    "meta-llama/Llama-2-13b-hf": (5120, 13_824, 40, 40, 40),
    "codellama/CodeLlama-34b-hf": (8192, 22_016, 48, 64, 8),
    "meta-llama/Llama-2-70b-hf": (8192, 28_672, 80, 64, 8),
    "meta-llama/Llama-3.1-8B": (4096, 14_336, 32, 32, 8),
    "HuggingFaceTB/SmolLM2-135M-Instruct": (576, 1536, 30, 9, 3),
}
QWEN3 = {
    "Qwen/Qwen3-0.6B-Base": (1024, 3072, 28, 16, 8),
    "Qwen/Qwen3-8B-Base": (4096, 12_288, 36, 32, 8),
}
MODELS = {*OPT, *LLAMA, *QWEN3}


def config_of(name):
    if name in OPT:
        hidden, layers, heads = OPT[name]
        sizes = {"hidden_size": hidden, "ffn_dim": 4 * hidden, "word_embed_proj_dim": hidden}
        if name.endswith("350m"):
            sizes |= {"word_embed_proj_dim": 512, "do_layer_norm_before": False}
        return OPTConfig(**sizes, num_hidden_layers=layers, num_attention_heads=heads)
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads",)
    sizes = dict(zip(names, (LLAMA | QWEN3)[name], strict=True))
    if name in QWEN3:
        sizes |= {"vocab_size": 151_936, "max_position_embeddings": 32_768, "head_dim": 128}
        return Qwen3Config(**sizes, tie_word_embeddings="0.6B" in name)
    if "SmolLM2" in name:
        sizes |= {"vocab_size": 49_152, "tie_word_embeddings": True}
        return LlamaConfig(**sizes, max_position_embeddings=8192)
    later = {"vocab_size": 128_256, "max_position_embeddings": 131_072}
    return LlamaConfig(**sizes, **later if "3.1" in name else {"max_position_embeddings": 4096})


def here(name, folder):
    """A folder with the configuration of a hub model; other names unchanged."""
    if name not in MODELS:
        return name
    path = folder / name.replace("/", "_")
    config_of(name).save_pretrained(path)
    return str(path)


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in RECIPES]
)
def test_a_recipe_fits_its_devices(name, tmp_path, monkeypatch, gpus_here):
    monkeypatch.chdir(ROOT)
    argv = ["--recipe", name, "--dry_run", "--output_dir", str(tmp_path / "out")]
    if name == "distill":  # the teacher is the result of another run
        argv += ["--teacher_model_name_or_path", "builtin/tiny"]
    if name in ("game", "search", "tools"):  # examples/ write the data
        argv += ["--data_path", "builtin/arithmetic"]
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
        estimate = estimator(number)
        assert estimate.fits, (number, estimate)
