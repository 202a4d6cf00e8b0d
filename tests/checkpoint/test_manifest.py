"""Damaged checkpoints and other formats are refused; settings are compared."""

import dataclasses
import errno
import json
import os
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from damages import broken_link, flip, pipe, remove
from fakes import names, save, step_loaded

from dschat.checkpoint import manifest
from dschat.checkpoint.compatibility import check_start, settings_of
from dschat.checkpoint.manager import CheckpointManager, RunState
from dschat.checkpoint.manifest import (
    MANIFEST,
    Damaged,
    manifest_bytes,
    newest,
    read_manifest,
    sha256_of,
)
from dschat.config import SFTConfig, UserError

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
    (tmp_path / "checkpoints").mkdir()
    assert CheckpointManager(tmp_path, {}).latest() is None


@pytest.mark.parametrize("code", [errno.EACCES, errno.ESTALE, errno.EIO, errno.ELOOP])
def test_a_disk_that_does_not_answer_has_no_end_of_checkpoints(code, tmp_path, monkeypatch):
    save(CheckpointManager(tmp_path, {}), 1)
    monkeypatch.setattr(Path, "iterdir", Mock(side_effect=OSError(code, os.strerror(code))))
    said = f"the checkpoints in .*/checkpoints cannot be listed: {os.strerror(code)}; make them"
    for looks in (newest, lambda folder: CheckpointManager(folder, {}).latest(), begin, restart):
        with pytest.raises(UserError, match=said):
            looks(tmp_path)


@pytest.mark.parametrize("harm", [pipe, broken_link, lambda path: path.write_text("")])
def test_what_is_no_folder_has_no_end_of_checkpoints(harm, tmp_path):
    """A link to a disk that is not mounted is not an empty disk."""
    harm(tmp_path / "checkpoints")
    for looks in (newest, begin, restart):
        with pytest.raises(UserError, match="the checkpoints in .*/checkpoints cannot be listed: "):
            looks(tmp_path)


def test_a_disk_that_goes_after_a_checkpoint_is_complete_costs_none(tmp_path, monkeypatch):
    """Older ones stay, beyond the limit."""
    checkpoints = CheckpointManager(tmp_path, {}, total_limit=1)
    save(checkpoints, 1)
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "step_folders", Mock(side_effect=UserError("cannot be listed")))
        save(checkpoints, 2)
    assert checkpoints.last.name == "step_000002"
    assert names(tmp_path) == ["step_000001", "step_000002"]
    save(checkpoints, 3)
    assert names(tmp_path) == ["step_000003"]


def begin(folder):
    check_start(SFTConfig(output_dir=str(folder)), 1)


def restart(folder):
    check_start(SFTConfig(output_dir=str(folder), overwrite_output_dir=True), 1)


@pytest.mark.parametrize("harm", [pipe, broken_link, remove])
@pytest.mark.parametrize("name", ["", "manifest.json", "values.json", "actor"])
def test_a_checkpoint_of_another_kind_is_damaged(harm, name, tmp_path):
    """It is not skipped as if it had never been: alone, it is refused."""
    checkpoints = CheckpointManager(tmp_path, {})
    save(checkpoints, 1, 2)
    place = tmp_path / "checkpoints/step_000002"
    harm(place / name)
    assert newest(tmp_path).step == 1
    assert step_loaded(checkpoints) == 1
    if (harm, name) == (remove, ""):
        return
    with pytest.raises(UserError, match="unfinished run, with checkpoints/step_000002"):
        begin(tmp_path)
    save(checkpoints, 2)
    assert names(tmp_path) == ["step_000001", "step_000002"]
    assert step_loaded(checkpoints) == 2


def test_other_files_beside_checkpoints_are_none(tmp_path):
    save(CheckpointManager(tmp_path, {}), 1)
    (tmp_path / "checkpoints/notes.txt").write_text("")
    assert newest(tmp_path).step == 1


def test_a_manifest_may_be_a_link(tmp_path):
    """As in a copy that shares its files."""
    save(CheckpointManager(tmp_path, {}), 1)
    path = tmp_path / "checkpoints/step_000001/manifest.json"
    path.rename(tmp_path / "elsewhere.json")
    path.symlink_to(tmp_path / "elsewhere.json")
    assert newest(tmp_path).step == 1
    (tmp_path / "elsewhere.json").unlink()
    os.mkfifo(tmp_path / "elsewhere.json")
    with pytest.raises(Damaged, match="a pipe or a device"):
        read_manifest(path.parent)


def test_a_deep_manifest_is_broken(tmp_path):
    save(CheckpointManager(tmp_path, {}), 1, 2)
    (tmp_path / "checkpoints/step_000002" / MANIFEST).write_text('{"a":' * 10_000)
    assert newest(tmp_path).step == 1


def test_damaged_values_lead_to_the_checkpoint_before(tmp_path):
    """Whatever they would have the log be: not even a log that is gone ends a run."""
    log = {"log": {"bytes": 17, "rows": ""}}
    checkpoints = CheckpointManager(tmp_path, settings_of(SFTConfig()))
    for step in (1, 2):
        checkpoints.save(step, RunState(values=log | {"step": step}))
        checkpoints.wait()
    place = tmp_path / "checkpoints/step_000002"
    values = (place / "values.json").read_bytes()
    (place / "values.json").write_bytes(values.replace(b"17", b"97"))
    assert checkpoints.latest().step == 1
    config = SFTConfig(output_dir=str(tmp_path), resume="latest")
    check_start(config, 1)
    check_start(dataclasses.replace(config, resume=str(place)), 1)  # which `latest` refuses
    with pytest.raises(UserError, match=r"values.json has another checksum than the manifest says"):
        checkpoints.latest(place)


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
