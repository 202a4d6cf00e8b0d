"""Damaged checkpoints and other formats are refused; settings are compared."""

import json
import os

import pytest
import torch
from fakes import names, save, step_loaded

from dschat.checkpoint.manager import CheckpointManager
from dschat.checkpoint.manifest import MANIFEST, manifest_bytes, newest, sha256_of
from dschat.config import UserError


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "a byte": (flip, "checksum"),
    "truncated": (lambda path: os.truncate(path, path.stat().st_size - 1), "bytes"),
    "empty": (lambda path: path.write_bytes(b""), "bytes"),
    "missing": (lambda path: path.unlink(), "missing"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_and_the_checkpoint_before_it_taken(damage, tmp_path, caplog):
    checkpoints = CheckpointManager(tmp_path, {})
    save(checkpoints, 1, 2)
    harm, word = DAMAGES[damage]
    for name in ("actor/mp_rank_00_model_states.pt", "rank_00000.safetensors", "values.json"):
        save(checkpoints, 3)
        path = tmp_path / "checkpoints/step_000003" / name
        harm(path)
        caplog.clear()
        assert step_loaded(checkpoints) == 2
        assert str(path) in caplog.text
        assert word in caplog.text
        with pytest.raises(UserError, match=f"--resume .*{path}.*{word}.*--resume latest"):
            checkpoints.latest(path.parents[len(name.split("/")) - 1])
    save(checkpoints, 3)
    assert step_loaded(checkpoints) == 3
    assert names(tmp_path) == ["step_000001", "step_000002", "step_000003"]


def test_any_byte_of_the_manifest(tmp_path, caplog):
    save(CheckpointManager(tmp_path, {"seed": 1}), 1)
    path = tmp_path / "checkpoints/step_000001" / MANIFEST
    good = path.read_bytes()
    assert newest(tmp_path).step == 1
    for place in range(0, len(good), 7):
        bad = bytearray(good)
        bad[place] ^= 4
        try:
            same = json.loads(bad) == json.loads(good)  # white space
        except ValueError:
            same = False
        path.write_bytes(bad)
        assert (newest(tmp_path) is not None) == same, place
    for text in (b"", b"null", b"[1]", good[:-40]):
        path.write_bytes(text)
        caplog.clear()
        with pytest.raises(UserError, match="no checkpoint in .* is complete .*; restore one, or "):
            CheckpointManager(tmp_path, {}).latest()
        assert f"{path} is broken" in caplog.text
    content = json.loads(good) | {"format": 99}
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"format 99, this version reads 3"):
        CheckpointManager(tmp_path, {}).latest(path.parent)


@pytest.mark.parametrize("path", ["nowhere", "."])
def test_a_path_that_is_no_checkpoint(path, tmp_path):
    with pytest.raises(UserError, match=r"--resume .*manifest.json.*No such file.*step_000100"):
        CheckpointManager(tmp_path, {}).latest(tmp_path / path)


def test_a_path_is_taken_though_there_are_newer_ones_which_then_go(tmp_path):
    save(CheckpointManager(tmp_path, {}), 1, 2, 5)
    checkpoints = CheckpointManager(tmp_path, {})
    path = tmp_path / "checkpoints/step_000001"
    assert step_loaded(checkpoints, path) == 1
    assert len(names(tmp_path)) == 3  # whatever else may be wrong, nothing is lost yet
    checkpoints.remove_later(checkpoints.latest(path))
    assert names(tmp_path) == ["step_000001"]  # the metrics are cut back to it
    save(checkpoints, 3)
    assert names(tmp_path) == ["step_000001", "step_000003"]


def test_a_file_outside_of_the_manifest_is_not_unpickled(tmp_path, caplog):
    """DeepSpeed takes every file of its pattern."""
    checkpoints = CheckpointManager(tmp_path, {})
    save(checkpoints, 1, 2)
    stray = tmp_path / "checkpoints/step_000002/actor/mp_rank_01_model_states.pt"
    torch.save({}, stray)
    assert step_loaded(checkpoints) == 1
    assert f"{stray} is not in the manifest" in caplog.text
    checkpoints.remove_later(checkpoints.latest())
    assert names(tmp_path) == ["step_000001", "step_000002"]  # it may be repaired
    save(checkpoints, 2)
    assert step_loaded(checkpoints) == 2


def test_a_folder_without_checkpoints_is_no_mistake(tmp_path):
    assert CheckpointManager(tmp_path, {}).latest() is None


def test_pickles_of_others_are_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "evil"),)

    checkpoints = CheckpointManager(tmp_path, {})
    save(checkpoints, 1)
    found = checkpoints.latest()
    name = "actor/mp_rank_00_model_states.pt"
    torch.save({"w": Evil()}, found.folder / name)
    size, sha = (found.folder / name).stat().st_size, sha256_of(found.folder / name)
    text = manifest_bytes(1, 1, {}, found.files | {name: (size, sha)})
    (found.folder / MANIFEST).write_bytes(text)
    with pytest.raises(UserError, match=rf"--resume .*{name} asks for posix.mkdir"):
        step_loaded(checkpoints)
    assert not (tmp_path / "evil").exists()
