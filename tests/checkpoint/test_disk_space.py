"""A full disk is one line: what needs how much space where, and what to resume from."""

import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from fakes import save
from safetensors import SafetensorError
from step_cases import probe_logprobs
from tiny_models import causal_lm, tokenizer
from transformers import AutoModelForCausalLM

from dschat.builtin import tiny_model
from dschat.checkpoint import atomic_files, hf_export
from dschat.checkpoint.hf_export import export_hf
from dschat.checkpoint.manager import CheckpointManager
from dschat.config import UserError
from dschat.distributed.machine import free_bytes, is_full, needed_and_free
from dschat.hybrid.weight_stream import adapter_stream, weight_bytes, weight_stream
from dschat.models.lora import prepare_for_training
from dschat.runtime import output_dir
from dschat.runtime.output_dir import check_room

RUST = "Error while serializing: I/O error: No space left on device (os error 28)"
CPU = torch.device("cpu")


def test_errors_of_a_full_disk():
    assert is_full(OSError(errno.ENOSPC, "No space left on device"))
    assert is_full(OSError(errno.EDQUOT, "Disk quota exceeded"))
    assert is_full(SafetensorError(RUST))
    assert not is_full(OSError(errno.EACCES, "Permission denied"))
    assert not is_full(SafetensorError("I/O error: Permission denied (os error 13)"))
    assert not is_full(KeyboardInterrupt())


def test_what_a_disk_takes(tmp_path, monkeypatch):
    usage = os.statvfs(tmp_path)
    free = free_bytes(tmp_path / "not/there/yet")
    assert free == pytest.approx(usage.f_bavail * usage.f_frsize, rel=0.05)
    usage = SimpleNamespace(total=2**30, used=2**30, free=2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert needed_and_free(3 * 2**29, tmp_path) == "1.50 GiB needed, 1.0 MiB free"
    assert needed_and_free(2**19, tmp_path) == "0.5 MiB needed"
    usage.total = usage.used = usage.free = 0
    assert free_bytes(tmp_path) > 2**60  # a disk that does not tell


@pytest.mark.parametrize(
    ("sizes", "there", "free", "fits"),
    [
        ([5], 0, 5, True),
        ([5], 0, 4, False),
        ([5, 3], 0, 8, True),
        ([5, 3], 0, 7, False),
        ([5, 3], 6, 5, True),  # the second one takes an old one's place
        ([5, 3], 6, 4, False),  # the first one does not yet
    ],
)
def test_models_that_do_not_fit_are_refused(sizes, there, free, fits, tmp_path, monkeypatch):
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor/model.safetensors").write_bytes(b"x" * there)
    monkeypatch.setattr(output_dir, "free_bytes", lambda folder: free)
    if fits:
        check_room(tmp_path, sizes)
        return
    with pytest.raises(UserError, match="--output_dir .* no space for the model: .*; free some"):
        check_room(tmp_path, sizes)


@pytest.mark.parametrize("lora", [0, 2])
@pytest.mark.parametrize("name", ["llama_tied", "opt_350m"])
def test_the_size_of_a_model_is_known_before_it_is_written(name, lora):
    model = prepare_for_training(causal_lm(name), False, lora, 8.0, ["all-linear"], True, "")
    assert weight_bytes(model) == sum(t.nbytes for _, t in weight_stream(model, CPU))


def test_a_model_that_a_full_disk_does_not_take(tmp_path, monkeypatch):
    model, folder, written = causal_lm("llama"), tmp_path / "out/actor", []

    def save_model(max_file_bytes=1 << 30):
        stream = weight_stream(model, CPU)
        companions = (model, model.config, tokenizer())
        export_hf(folder, stream, *companions, max_file_bytes=max_file_bytes)

    def full(tensors, path, **options):
        written.append(path)
        if len(written) == 2:
            raise SafetensorError(RUST)
        safetensors.torch.save_file(tensors, path, **options)

    save_model()
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.setattr(atomic_files, "save_file", full)
    monkeypatch.setattr(
        hf_export, "needed_and_free", lambda num_bytes, folder: f"{num_bytes} needed"
    )
    needed = sum(p.nbytes for p in model.parameters())
    with pytest.raises(UserError, match=f"actor has no space .*: {needed} needed.*train again"):
        save_model(max_file_bytes=20_000)
    assert len(written) == 2  # of many; the others are not tried
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert os.listdir(tmp_path / "out") == ["actor"]
    save(CheckpointManager(tmp_path / "out", {}), 2, 4)
    written.clear()
    with pytest.raises(UserError, match="resume from .*out/checkpoints/step_000004 "):
        save_model(max_file_bytes=20_000)
    monkeypatch.undo()
    loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert probe_logprobs(loaded) == probe_logprobs(model)


def test_an_adapter_that_a_full_disk_does_not_take(tmp_path, monkeypatch):
    model = prepare_for_training(causal_lm("llama"), False, 2, 8.0, ["all-linear"], True, "")

    def full(tensors, path, **_):
        Path(path).write_bytes(b"half")
        raise SafetensorError(RUST)

    save(CheckpointManager(tmp_path, {}), 4)
    monkeypatch.setattr(atomic_files, "save_file", full)
    with pytest.raises(UserError, match="/adapter has no space .* resume from .*/step_000004 "):
        hf_export.export_adapter(tmp_path / "actor/adapter", adapter_stream(model, CPU), model)
    assert list((tmp_path / "actor/adapter").iterdir()) == []


def test_the_built_in_model_that_its_cache_does_not_take(tmp_path, monkeypatch):
    assert tiny_model.resolve_model("builtin/tiny", tmp_path)
    size = sum(path.stat().st_size for path in tmp_path.rglob("*"))
    assert size <= tiny_model._NUM_BYTES < 1.2 * size

    def full(*_, **__):
        raise SafetensorError(RUST)

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(UserError, match="the cache .*/new has no space for builtin/tiny: .* XDG_"):
        tiny_model.resolve_model("builtin/tiny", tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []
