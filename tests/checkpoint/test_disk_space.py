"""A full disk is one line: what needs how much space where, and what to resume from."""

import errno
import os
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from fakes import FULL, save
from safetensors import SafetensorError
from step_cases import probe_logprobs
from tiny_models import causal_lm, tokenizer
from transformers import AutoModelForCausalLM

from dschat.builtin import tiny_model
from dschat.checkpoint import hf_export
from dschat.checkpoint.hf_export import export_hf
from dschat.checkpoint.manager import CheckpointManager
from dschat.config import UserError
from dschat.distributed.machine import free_bytes, is_full, needed_and_free
from dschat.hybrid.weight_stream import adapter_stream, weight_bytes, weight_stream
from dschat.models.lora import prepare_for_training
from dschat.runtime.output_dir import check_room

CPU = torch.device("cpu")


def test_errors_of_a_full_disk():
    assert is_full(OSError(errno.ENOSPC, "No space left on device"))
    assert is_full(OSError(errno.EDQUOT, "Disk quota exceeded"))
    assert is_full(SafetensorError(FULL))
    assert not is_full(OSError(errno.EACCES, "Permission denied"))
    assert not is_full(SafetensorError("I/O error: Permission denied (os error 13)"))
    assert not is_full(KeyboardInterrupt())


def test_a_folder_has_the_space_of_its_disk(tmp_path):
    usage = os.statvfs(tmp_path)
    free = free_bytes(tmp_path / "not/there/yet")
    assert free == pytest.approx(usage.f_bavail * usage.f_frsize, rel=0.05)


@pytest.fixture
def usage(monkeypatch):
    """What the system says of every disk, in bytes."""
    usage = SimpleNamespace(total=2**30, used=2**30, free=2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    return usage


def test_what_a_disk_takes(tmp_path, usage):
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
def test_models_that_do_not_fit_are_refused(sizes, there, free, fits, tmp_path, usage):
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor/model.safetensors").write_bytes(b"x" * there)
    usage.free = free
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


def test_a_model_that_a_full_disk_does_not_take(tmp_path, monkeypatch, disk):
    model, folder = causal_lm("llama"), tmp_path / "out/actor"

    def save_model(max_file_bytes=1 << 30):
        stream = weight_stream(model, CPU)
        companions = (model, model.config, tokenizer())
        export_hf(folder, stream, *companions, max_file_bytes=max_file_bytes)

    save_model()
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.setattr(
        hf_export, "needed_and_free", lambda num_bytes, folder: f"{num_bytes} needed"
    )
    needed = sum(p.nbytes for p in model.parameters())
    disk.room = 30_000  # of two files or more the first
    with pytest.raises(UserError, match=f"actor has no space .*: {needed} needed.*train again"):
        save_model(max_file_bytes=20_000)
    assert disk.refused == 1  # of many; the others are not tried
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert os.listdir(tmp_path / "out") == ["actor"]
    disk.room = sys.maxsize
    save(CheckpointManager(tmp_path / "out", {}), 2, 4)
    disk.room = 30_000
    with pytest.raises(UserError, match="resume from .*out/checkpoints/step_000004 "):
        save_model(max_file_bytes=20_000)
    loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert probe_logprobs(loaded) == probe_logprobs(model)


def test_an_adapter_that_a_full_disk_does_not_take(tmp_path, disk):
    model = prepare_for_training(causal_lm("llama"), False, 2, 8.0, ["all-linear"], True, "")
    save(CheckpointManager(tmp_path, {}), 4)
    disk.room = 0
    with pytest.raises(UserError, match="/adapter has no space .* resume from .*/step_000004 "):
        hf_export.export_adapter(tmp_path / "actor/adapter", adapter_stream(model, CPU), model)
    assert list((tmp_path / "actor/adapter").iterdir()) == []


def test_the_built_in_model_that_its_cache_does_not_take(tmp_path, disk):
    assert tiny_model.resolve_model("builtin/tiny", tmp_path)
    size = sum(path.stat().st_size for path in tmp_path.rglob("*"))
    assert size <= tiny_model._NUM_BYTES < 1.2 * size
    disk.room = 0
    with pytest.raises(UserError, match="the cache .*/new has no space for builtin/tiny: .* XDG_"):
        tiny_model.resolve_model("builtin/tiny", tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []
