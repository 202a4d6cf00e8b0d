"""metrics.jsonl of a resumed run has every row exactly once."""

import errno
import json
import math
import os
import shutil
import sys
from types import SimpleNamespace

import numpy
import pytest

from dschat.config import SFTConfig
from dschat.observability.metrics_log import MetricsLog, RowFile


def log_of(folder, resume=None, tensorboard=False):
    return MetricsLog(
        str(folder), SFTConfig(resume=resume, report_to=["tensorboard" if tensorboard else "none"])
    )


def steps(folder):
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").open()]


@pytest.mark.parametrize("tensorboard", [False, True])
def test_rows_after_the_checkpoint_are_dropped(tmp_path, tensorboard):
    log = log_of(tmp_path, tensorboard=tensorboard)
    log.begin()
    for step in range(3):
        log.write(step, {"loss": 0.5})
    position = log.position()
    assert position == {"bytes": (tmp_path / "metrics.jsonl").stat().st_size, "rows": ""}
    log.write(3, {"loss": 0.5})  # and the process is killed here
    log = log_of(tmp_path, "latest", tensorboard)
    log.write(0, {"eval/gold": 0.0})  # before the checkpoint is chosen
    log.resume_from(position, 2)
    assert log.position() == position
    log.write(3, {"loss": 0.25})
    log.close()
    assert steps(tmp_path) == [0, 1, 2, 3]


@pytest.mark.parametrize("resume", [None, "latest"])
def test_a_run_without_a_checkpoint_drops_earlier_rows(tmp_path, resume):
    log = log_of(tmp_path)
    log.write(7, {"loss": 0.5})
    log.close()
    log = log_of(tmp_path, resume)
    log.write(0, {"eval/gold": 0.0})
    log.begin()
    log.write(1, {"loss": 0.5})
    log.close()
    assert steps(tmp_path) == [0, 1]


class FullDisk:
    """A file with space for ``room`` more bytes."""

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
    """It fills up in the middle of a row; a checkpoint saved then has the rest."""
    log = log_of(tmp_path)
    log.begin()
    log.write(0, {"loss": 0.5})
    log._rows._file = FullDisk(log._rows._file, 7)
    for step in (1, 2, 3):
        log.write(step, {"loss": 0.5})
    assert caplog.text.count("cannot be written (No space left on device); training continues") == 1
    position = log.position()
    assert position["bytes"] == (tmp_path / "metrics.jsonl").stat().st_size
    shutil.copytree(tmp_path, tmp_path / "killed")
    log._rows._file.room = 10_000
    log.write(4, {"loss": 0.5})
    log.close()
    assert caplog.text.count("is writable again") == 1
    assert steps(tmp_path) == [0, 1, 2, 3, 4]
    log = log_of(tmp_path / "killed", "latest")
    log.resume_from(position, 3)
    log.write(4, {"loss": 0.5})
    log.close()
    assert (tmp_path / "killed/metrics.jsonl").read_bytes() == (
        tmp_path / "metrics.jsonl"
    ).read_bytes()


def test_a_file_that_was_cut_keeps_its_whole_rows(tmp_path, caplog):
    """Rows that this process wrote before do not make it long enough."""
    log = log_of(tmp_path)
    log.write(1, {"loss": 0.5})
    whole = (tmp_path / "metrics.jsonl").stat().st_size
    log.write(2, {"loss": 0.5})
    position = log.position()
    log.close()
    os.truncate(tmp_path / "metrics.jsonl", whole + 9)
    log = log_of(tmp_path, "latest")
    log.write(0, {"eval/gold": 0.0, "eval/more": 0.0})
    log.resume_from(position, 2)
    log.write(3, {"loss": 0.5})
    log.close()
    assert "metrics.jsonl lacks rows of the first 2 steps: they are lost" in caplog.text
    assert steps(tmp_path) == [1, 3]


def sampling_log(folder, resume=None):
    config = SFTConfig(resume=resume, report_to=["none"])
    return MetricsLog(str(folder), config, has_samples=True)


def test_samples_after_the_checkpoint_are_dropped_too(tmp_path):
    log = sampling_log(tmp_path)
    log.begin()
    log.write_samples(1, {"scores": [0.5]})
    position = json.loads(json.dumps(log.position()))  # as a checkpoint stores it
    log.write_samples(10, {"scores": [0.25]})  # and the process is killed here
    log = sampling_log(tmp_path, "latest")
    log.resume_from(position, 5)
    log.write_samples(10, {"scores": [0.75]})
    log.close()
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").open()]
    assert rows == [{"step": 1, "scores": [0.5]}, {"step": 10, "scores": [0.75]}]


def test_a_checkpoint_of_a_run_without_samples_drops_them_all(tmp_path):
    (tmp_path / "samples.jsonl").write_text('{"step": 1}\n')
    log = sampling_log(tmp_path, "latest")
    log.resume_from({"bytes": 0, "rows": ""}, 5)
    log.close()
    assert (tmp_path / "samples.jsonl").read_text() == ""


def test_other_sinks_get_samples_as_text_and_table(tmp_path, monkeypatch):
    """With fakes of the parts that are called."""
    texts, logged = [], []
    writer = SimpleNamespace(add_text=lambda *a: texts.append(a), close=lambda: None)
    run = SimpleNamespace(id="a", log=lambda row, step: logged.append((row, step)), finish=str)
    for name, fake in {
        "torch.utils.tensorboard": SimpleNamespace(SummaryWriter=lambda folder: writer),
        "wandb": SimpleNamespace(init=lambda **_: run, Table=lambda columns, data: (columns, data)),
    }.items():
        monkeypatch.setitem(sys.modules, name, fake)
    log = MetricsLog(str(tmp_path), SFTConfig(report_to=["tensorboard", "wandb"]))
    log.write_answers(3, [{"answer": "<b>|\n", "score": 0.25}])
    log.close()
    assert texts == [
        ("samples", "| answer | score |\n| --- | --- |\n| &lt;b&gt;&#124;<br> | 0.25 |", 3)
    ]
    assert logged == [({"samples": (["answer", "score"], [["<b>|\n", 0.25]])}, 3)]


def test_starts_tell_a_resume_from_a_restart(tmp_path):
    log = log_of(tmp_path)
    log.begin()
    log.write(1, {"loss": 0.5})
    position = log.position()
    log.close()
    log = log_of(tmp_path, "latest")
    log.resume_from(position, 1)
    log.close()
    log = log_of(tmp_path)
    log.begin()
    log.close()
    rows = [json.loads(line) for line in (tmp_path / "starts.jsonl").open()]
    assert [(row["event"], row["step"]) for row in rows] == [
        ("start", 0),
        ("resume", 1),
        ("restart", 0),
    ]
    assert all(row["versions"]["numpy"] == numpy.__version__ for row in rows)
    assert {row["processes"] for row in rows} == {1}


def test_weights_and_biases_continues_its_run(tmp_path, monkeypatch):
    """With a fake of the parts of wandb that are called."""
    begun = []

    def init(**options):
        begun.append(options)
        return SimpleNamespace(id="abc", finish=lambda: None)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    for resume in (None, "latest", None):
        config = SFTConfig(resume=resume, report_to=["wandb"])
        MetricsLog(str(tmp_path), config).close()
    first, second, third = begun
    assert {"id": "abc", "resume": "allow"}.items() <= second.items()
    assert "id" not in first
    assert "id" not in third


def test_every_row_is_json(tmp_path):
    """JSON has no NaN: readers in other languages, and jq, refuse the file."""
    file = RowFile(tmp_path / "rows.jsonl", keeps_rows=False)
    file.write({"step": 1, "a": math.nan, "b": [1.5, -math.inf], "text": "NaN is text"})
    file.close()

    def refuse(constant):
        raise AssertionError(constant)

    row = json.loads((tmp_path / "rows.jsonl").read_text(), parse_constant=refuse)
    assert row == {"step": 1, "a": None, "b": [1.5, None], "text": "NaN is text"}
