"""metrics.jsonl of a run that goes on: no gap, and nothing twice."""

import errno
import json
import os
import shutil
import sys
from types import SimpleNamespace

import pytest

from dschat.config import SFTConfig, UserError
from dschat.observability.metrics_log import MetricsLog


def log_of(folder, resume=None, tensorboard=False):
    return MetricsLog(str(folder), SFTConfig(resume=resume, enable_tensorboard=tensorboard))


def steps(folder):
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").open()]


@pytest.mark.parametrize("tensorboard", [False, True])
def test_what_came_after_the_checkpoint_is_forgotten(tmp_path, tensorboard):
    log = log_of(tmp_path, tensorboard=tensorboard)
    log.begin()
    for step in range(3):
        log.write(step, {"loss": 0.5})
    position = log.position()
    assert position == {"bytes": (tmp_path / "metrics.jsonl").stat().st_size, "rows": ""}
    log.write(3, {"loss": 0.5})  # and the process is killed here
    log = log_of(tmp_path, "latest", tensorboard)
    log.write(0, {"eval/gold": 0.0})  # before it is known where to go on
    log.go_on_from(position, 2)
    assert log.position() == position
    log.write(3, {"loss": 0.25})
    log.close()
    assert steps(tmp_path) == [0, 1, 2, 3]


@pytest.mark.parametrize("resume", [None, "latest"])
def test_a_run_with_nothing_to_go_on_from_begins(tmp_path, resume):
    log = log_of(tmp_path)
    log.write(7, {"loss": 0.5})
    log.close()
    log = log_of(tmp_path, resume)
    log.write(0, {"eval/gold": 0.0})
    log.begin()
    log.write(1, {"loss": 0.5})
    log.close()
    assert steps(tmp_path) == [0, 1]


def test_a_log_that_was_cut_is_an_error(tmp_path):
    log_of(tmp_path).close()
    log = log_of(tmp_path, "latest")
    with pytest.raises(UserError, match="metrics.jsonl is shorter than when the checkpoint"):
        log.go_on_from({"bytes": 100, "rows": ""}, 2)
    log.close()


class FullDisk:
    """A file that takes ``room`` more bytes."""

    def __init__(self, file, room):
        self._file, self.room = file, room

    def write(self, data):
        taken = data[: self.room]
        self.room -= len(taken)
        if not taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._file.write(taken)

    def __getattr__(self, name):
        return getattr(self._file, name)


def test_rows_wait_while_the_disk_is_full(tmp_path, caplog):
    """In the middle of a row; a checkpoint made then has what is missing."""
    log = log_of(tmp_path)
    log.begin()
    log.write(0, {"loss": 0.5})
    log._file = FullDisk(log._file, 7)
    for step in (1, 2, 3):
        log.write(step, {"loss": 0.5})
    assert caplog.text.count("cannot be written (No space left on device); training goes on") == 1
    position = log.position()
    assert position["bytes"] == (tmp_path / "metrics.jsonl").stat().st_size
    shutil.copytree(tmp_path, tmp_path / "killed")
    log._file.room = 10_000
    log.write(4, {"loss": 0.5})
    log.close()
    assert caplog.text.count("is written again") == 1
    assert steps(tmp_path) == [0, 1, 2, 3, 4]
    log = log_of(tmp_path / "killed", "latest")
    log.go_on_from(position, 3)
    log.write(4, {"loss": 0.5})
    log.close()
    assert (tmp_path / "killed/metrics.jsonl").read_bytes() == (
        tmp_path / "metrics.jsonl"
    ).read_bytes()


def test_rows_of_this_process_do_not_make_a_short_file_long(tmp_path):
    log = log_of(tmp_path)
    log.write(1, {"loss": 0.5})
    position = log.position()
    log.close()
    os.truncate(tmp_path / "metrics.jsonl", 9)
    log = log_of(tmp_path, "latest")
    log.write(0, {"eval/gold": 0.0, "eval/more": 0.0})
    with pytest.raises(UserError, match="metrics.jsonl is shorter"):
        log.go_on_from(position, 2)
    log.close()


def test_weights_and_biases_goes_on_with_its_run(tmp_path, monkeypatch):
    """As much of the library as is called."""
    begun = []

    def init(**options):
        begun.append(options)
        return SimpleNamespace(id="abc", finish=lambda: None)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    for resume in (None, "latest", None):
        config = SFTConfig(resume=resume, enable_tensorboard=False, enable_wandb=True)
        MetricsLog(str(tmp_path), config).close()
    first, second, third = begun
    assert {"id": "abc", "resume": "allow"}.items() <= second.items()
    assert "id" not in first
    assert "id" not in third
