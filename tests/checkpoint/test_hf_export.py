"""Export: a folder that transformers loads, in files of any size, complete or absent."""

import json
import subprocess
from itertools import product

import pytest
import torch
from quick import some
from safetensors.torch import load_file
from step_cases import probe_logprobs
from tiny_models import EOS, causal_lm, tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from dschat.checkpoint.hf_export import export_hf
from dschat.config import UserError
from dschat.hybrid.weight_stream import weight_stream
from dschat.models.checkpoint import Checkpoint

CPU = torch.device("cpu")


def export(folder, model, **options):
    export_hf(
        folder,
        weight_stream(model, CPU),
        model,
        model.config,
        tokenizer(),
        **{"stop_ids": (EOS,)} | options,
    )


def assert_computes(folder, model):
    """``folder`` loads completely, and computes the log-probs of ``model`` to the bit."""
    loaded, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert probe_logprobs(loaded.eval()) == probe_logprobs(model)


@pytest.mark.parametrize(
    ("name", "max_file_bytes"),
    some(
        product(
            ["llama", "llama_tied", "opt_350m", "gpt2", "bloom", "qwen3"], [1 << 30, 20_000, 1]
        ),
        [("llama_tied", 20_000), ("gpt2", 1 << 30), ("opt_350m", 1)],
    ),
)
def test_files_of_any_size_load(name, max_file_bytes, tmp_path):
    model = causal_lm(name)
    export(tmp_path / "out", model, max_file_bytes=max_file_bytes)
    assert_computes(tmp_path / "out", model)
    files = list((tmp_path / "out").glob("*.safetensors"))
    assert (len(files) > 1) == (max_file_bytes < 1 << 30)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").get_vocab() == tokenizer().get_vocab()
    if len(files) > 1:
        index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
        for file in files:
            tensors = load_file(file)
            assert {index["weight_map"][key] for key in tensors} == {file.name}
            assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= max_file_bytes
        total = sum(p.nbytes for p in model.parameters())
        assert index["metadata"]["total_size"] == total


def test_a_flipped_bit_in_saved_weights_is_found(tmp_path):
    export(tmp_path / "out", causal_lm("llama"), max_file_bytes=20_000)
    done = subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=tmp_path / "out")
    assert done.returncode == 0
    Checkpoint(tmp_path / "out", "--model").check("lm")
    file = max((tmp_path / "out").glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=f"^--model .*: its {file.name} has another checksum than"):
        Checkpoint(tmp_path / "out", "--model").check("lm")
    (tmp_path / "out/SHA256SUMS").unlink()
    Checkpoint(tmp_path / "out", "--model").check("lm")


def test_the_companions(tmp_path):
    model = causal_lm("llama").to(torch.bfloat16)
    model.config.use_cache = False  # training's own setting
    export(tmp_path / "out", model, stop_ids=(EOS, 5))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == torch.bfloat16
    assert loaded.config.use_cache
    assert loaded.config.architectures == ["LlamaForCausalLM"]
    generation = GenerationConfig.from_pretrained(tmp_path / "out")
    assert (generation.eos_token_id, generation.pad_token_id) == ([EOS, 5], 1)
    assert not model.config.use_cache
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]  # for whom the umask lets read


@pytest.mark.parametrize(("of_config", "saved"), [(EOS, 5), ([EOS, 5], [EOS, 5]), (None, 5)])
def test_the_eos_of_another_tokenizer(of_config, saved, tmp_path):
    """Both files say what ends an answer: the tokenizer's, not only what the config had."""
    model, other = causal_lm("llama"), tokenizer()
    model.config.eos_token_id, other.eos_token = of_config, "w5"
    export_hf(tmp_path, weight_stream(model, CPU), model, model.config, other, stop_ids=(5,))
    assert AutoConfig.from_pretrained(tmp_path).eos_token_id == saved
    assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == 5
    assert AutoTokenizer.from_pretrained(tmp_path).eos_token_id == 5
    assert model.config.eos_token_id == of_config


QWEN = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20}


@pytest.mark.parametrize(
    ("of_base", "saved"),
    [
        (
            QWEN | {"repetition_penalty": 1.05, "max_length": 99},
            QWEN | {"repetition_penalty": 1.05},
        ),
        ({"temperature": 0.9, "top_p": 0.6}, {}),  # no do_sample: transformers saves no such set
        ({}, {}),
    ],
)
def test_sampling_defaults_of_the_base_stay(of_base, saved, tmp_path):
    causal_lm("llama").save_pretrained(tmp_path / "base")
    (tmp_path / "base/generation_config.json").write_text(json.dumps(of_base))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    export(tmp_path / "out", model)
    written = json.loads((tmp_path / "out/generation_config.json").read_text())
    kept = {"eos_token_id", "pad_token_id", "bos_token_id", "transformers_version"}
    assert {k: v for k, v in written.items() if k not in kept and v is not None} == saved
    assert written["eos_token_id"] == EOS
    AutoModelForCausalLM.from_pretrained(tmp_path / "out").generation_config.validate(strict=True)


def test_a_new_export_replaces_the_old_one_whatever_its_files(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("kept")
    for max_file_bytes, seed in ((1, 0), (1 << 30, 1), (20_000, 2)):
        model = causal_lm("llama", seed)
        export(folder, model, max_file_bytes=max_file_bytes)
        assert_computes(folder, model)
    assert (folder / "metrics.jsonl").read_text() == "kept"


def test_an_export_that_fails_leaves_the_old_one_alone(tmp_path):
    model = causal_lm("llama")
    export(tmp_path / "out", model)

    def broken():
        yield "lm_head.weight", torch.zeros(64, 32)
        raise KeyboardInterrupt

    for folder in ("out", "new"):
        with pytest.raises(KeyboardInterrupt):
            export_hf(tmp_path / folder, broken(), model, model.config, tokenizer())
    assert not (tmp_path / "new").exists()
    assert_computes(tmp_path / "out", model)
    export(tmp_path / "new", model)
    assert {p.name for p in tmp_path.iterdir()} == {"out", "new"}


def test_the_stream_may_reuse_its_buffer(tmp_path):
    model, buffer = causal_lm("llama"), torch.empty(64 * 64)

    def reusing():
        for name, p in model.named_parameters():
            view = buffer[: p.numel()].view(p.shape)
            yield name, view.copy_(p.detach())

    export_hf(tmp_path / "out", reusing(), model, model.config, tokenizer())
    assert_computes(tmp_path / "out", model)
