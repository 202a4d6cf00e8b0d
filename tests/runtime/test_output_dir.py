"""A step's folder: refused before anything loads, unchanged; claimed; marked."""

import errno
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
from damages import broken_link, folder, pipe

from dschat.config import UserError
from dschat.runtime import output_dir
from dschat.runtime.output_dir import (
    COMPLETE,
    check_output_dir,
    check_writable,
    claim_output_dir,
    mark_complete,
)
from dschat.startup.files import discard


def test_a_finished_step_is_not_overwritten_by_accident(tmp_path):
    folder = tmp_path / "deep" / "step1"
    check_output_dir(folder, overwrite=False)
    assert list(tmp_path.iterdir()) == []  # looking leaves nothing
    claim_output_dir(folder)
    check_output_dir(folder, overwrite=False)  # an unfinished one may be taken again
    mark_complete(folder)
    with pytest.raises(
        UserError, match="--output_dir .* holds a finished step.*--overwrite_output_dir"
    ):
        check_output_dir(folder, overwrite=False)
    check_output_dir(folder, overwrite=True)
    assert (folder / COMPLETE).exists()  # what fails before training leaves the old model finished
    claim_output_dir(folder, record="how")
    assert not (folder / COMPLETE).exists()
    mark_complete(folder)
    assert (folder / COMPLETE).read_text().startswith("how")


@pytest.mark.parametrize("below", ["", "below", "two/below"])
def test_a_file_in_the_way(tmp_path, below):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--output_dir .*: (Not a dir|File exi).*; choose another"):
        check_output_dir(tmp_path / "file" / below, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_dangling_link_is_in_the_way(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match="cannot be written"):
        check_output_dir(tmp_path / "link", overwrite=True)


@pytest.mark.parametrize("harm", [broken_link, pipe, folder])
@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "samples.jsonl", "warnings.jsonl", "training_config.yaml", "actor"]
)
def test_what_a_run_would_fail_to_write_is_found_before_it(name, harm, tmp_path):
    harm(tmp_path / name)
    if (name, harm) == ("actor", folder):
        check_output_dir(tmp_path, overwrite=True)
        return
    kind = "folder" if name == "actor" else "file"
    with pytest.raises(UserError, match=f"--output_dir {tmp_path}: its {name} is not a {kind};"):
        check_output_dir(tmp_path, overwrite=True)


def test_a_log_that_is_a_link_is_found_before_it(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "file")
    with pytest.raises(UserError, match="its metrics.jsonl is not a file"):
        check_output_dir(tmp_path, overwrite=True)


def test_old_checkpoints_go_before_the_mark_and_stay_where_a_run_resumes(tmp_path, monkeypatch):
    (tmp_path / "checkpoints/step_000002").mkdir(parents=True)
    (tmp_path / COMPLETE).write_text("")
    claim_output_dir(tmp_path, resumes=True)
    assert (tmp_path / "checkpoints/step_000002").is_dir()
    assert not (tmp_path / COMPLETE).exists()
    (tmp_path / COMPLETE).write_text("")
    removed = []
    monkeypatch.setattr(output_dir, "discard", lambda path: (removed.append(path), discard(path)))
    claim_output_dir(tmp_path)
    assert not (tmp_path / COMPLETE).exists()
    names = [str(path.relative_to(tmp_path)) for path in removed]
    assert names[:3] == ["checkpoints/step_000002", "checkpoints", COMPLETE]


def test_a_restart_removes_checkpoints_behind_a_link_and_the_links_of_models(tmp_path):
    """Users link both to a larger disk."""
    disk, run = tmp_path / "disk", tmp_path / "run"
    for name in ("checkpoints/step_000002", "checkpoints/mine", "actor"):
        (disk / name).mkdir(parents=True)
    run.mkdir()
    (disk / "checkpoints/step_000004").symlink_to(disk / "actor")
    (run / "checkpoints").symlink_to(disk / "checkpoints")
    (run / "actor").symlink_to(disk / "actor")
    (run / COMPLETE).mkdir()
    claim_output_dir(run, resumes=True)
    assert len(os.listdir(run / "checkpoints")) == 3
    claim_output_dir(run)
    assert os.listdir(run / "checkpoints") == ["mine"]
    assert sorted(os.listdir(run)) == [".lock", "checkpoints"]
    assert (disk / "actor").is_dir()


def test_checkpoints_that_stay_are_not_begun_over(tmp_path, monkeypatch):
    (tmp_path / "checkpoints/step_000002").mkdir(parents=True)
    monkeypatch.setattr(output_dir, "discard", lambda path: None)
    with pytest.raises(UserError, match="step_000002 cannot be removed; remove it by hand"):
        claim_output_dir(tmp_path)


WRITES = """
import time
from pathlib import Path
from dschat.runtime.output_dir import claim_output_dir

claim_output_dir("out")
Path("ready").write_text("")
time.sleep(60)
"""


@pytest.mark.slow
def test_two_runs_do_not_write_into_one_folder(tmp_path):
    """One whose train.py was killed loads on, and would clear away what another one saves."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    other = subprocess.Popen([sys.executable, "-c", WRITES], cwd=tmp_path, env=environment)
    try:
        while not (tmp_path / "ready").exists() and other.poll() is None:
            time.sleep(0.01)
        with pytest.raises(UserError, match="--output_dir .*out is being written by another run"):
            claim_output_dir(tmp_path / "out")
    finally:
        other.kill()
        other.wait()
    claim_output_dir(tmp_path / "out")  # the claim went with its process
    claim_output_dir(tmp_path / "out")
    mark_complete(tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [COMPLETE]


def test_a_model_that_the_new_run_does_not_write_goes(tmp_path):
    for name in ("actor", "actor_best", "actor_ema", "adapter", "critic", "reward_best", "mine"):
        (tmp_path / name).mkdir()
    claim_output_dir(tmp_path)  # of an unfinished run: kept until it is written again
    assert (tmp_path / "actor").exists()
    mark_complete(tmp_path)
    claim_output_dir(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["mine"]


def test_a_full_disk_leaves_no_mark(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    claim_output_dir(tmp_path, record="how")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            mark_complete(tmp_path)
    assert not (tmp_path / COMPLETE).exists()
    mark_complete(tmp_path)
    assert (tmp_path / COMPLETE).read_text().startswith("how")


def test_a_folder_that_cannot_be_made_when_training_begins(tmp_path):
    (tmp_path / "out").touch()
    with pytest.raises(UserError, match="--output_dir .*out cannot be made: File exists"):
        claim_output_dir(tmp_path / "out")


def test_what_another_machine_made_meanwhile_stays(tmp_path, monkeypatch):
    folder = tmp_path / "out" / "step1_sft"

    def other(dir):
        (Path(dir) / "its").touch()
        return nullcontext()

    monkeypatch.setattr("tempfile.TemporaryFile", other)
    check_writable(folder)
    assert (folder / "its").exists()
