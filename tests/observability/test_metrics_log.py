"""metrics.jsonl of a resumed run has every row exactly once."""

import json
import math
import os
import resource
import shutil
import sys
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import numpy
import pytest

from dschat.config import SFTConfig
from dschat.observability.metrics_log import MetricsLog, RowFile, is_finite, whole_rows


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
    log.write_warnings(2, ["far"])
    position = log.position()
    sizes = [(tmp_path / f"{name}.jsonl").stat().st_size for name in ("metrics", "warnings")]
    of_warnings = {"bytes": sizes[1], "rows": ""}
    assert position == {"bytes": sizes[0], "rows": "", "warnings": of_warnings}
    log.write(3, {"loss": 0.5})  # and the process is killed here
    log.write_warnings(3, ["gone", "and lost"])
    log = log_of(tmp_path, "latest", tensorboard)
    log.write(0, {"eval/gold": 0.0})  # before the checkpoint is chosen
    log.resume_from(position, 2)
    assert log.position() == position
    log.write(3, {"loss": 0.25})
    log.write_warnings(3, ["gone"])
    log.close()
    assert steps(tmp_path) == [0, 1, 2, 3]
    rows = map(json.loads, (tmp_path / "warnings.jsonl").open())
    assert list(rows) == [{"step": 2, "warning": "far"}, {"step": 3, "warning": "gone"}]


def test_a_held_out_metric_before_and_after_training(tmp_path, caplog):
    caplog.set_level("INFO", "dschat")
    log = log_of(tmp_path)
    log.write(0, {"eval/loss": 2.0, "eval/accuracy": math.nan})
    log.log_change("eval/loss")
    assert caplog.messages == []
    log.write(1, {"loss": 7.0})
    log.write(2, {"eval/loss": 1.23456, "eval/accuracy": 0.5})
    log.log_change("eval/accuracy")
    log.log_change("eval/loss")
    assert caplog.messages == ["held-out loss: 2 at first, 1.235 at the end"]


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


@contextmanager
def full_disk(num_bytes):
    """No file gets larger than that."""
    before, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, hard))


def test_rows_wait_while_the_disk_is_full(tmp_path, caplog):
    """It fills up in the middle of a row; a checkpoint saved then has the rest."""
    log = log_of(tmp_path)
    log.begin()
    log.write(0, {"loss": 0.5})
    with full_disk((tmp_path / "metrics.jsonl").stat().st_size + 7):
        for step in (1, 2, 3):
            log.write(step, {"loss": 0.5})
        position = log.position()
    assert caplog.text.count("cannot be written (File too large); training continues") == 1
    assert position["bytes"] == (tmp_path / "metrics.jsonl").stat().st_size
    shutil.copytree(tmp_path, tmp_path / "killed")
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


def row(step):
    return json.dumps({"step": step, "loss": 0.5}) + "\n"


@pytest.mark.parametrize(
    ("edit", "kept"),
    [
        (lambda text: text.replace("0.5", "0.54321", 1), [1, 2]),  # the place is in row 3
        (lambda text: text.replace("0.5", "0.54", 1), [1, 2]),  # it is the end of row 3
        (lambda text: text.replace(row(1), ""), [2, 3]),  # it is behind row 4
        (lambda text: text.replace(row(1), row(1)[:-2] + "\n"), [2, 3]),
        (lambda text: text.replace(row(3), ""), [1, 2]),
        (lambda text: row(9) + text, [1, 2]),
        (lambda text: "", []),
        (lambda text: text[:-5], [1, 2, 3]),
        (lambda text: text, [1, 2, 3]),
    ],
)
def test_an_edited_file_is_cut_behind_its_last_whole_row(edit, kept, tmp_path, caplog):
    file = tmp_path / "metrics.jsonl"
    file.write_text(edit("".join(map(row, (1, 2, 3, 4)))))
    log = log_of(tmp_path, "latest")
    log.resume_from({"bytes": 3 * len(row(1)), "rows": ""}, 3)
    log.write(4, {"loss": 0.25})
    log.close()
    rows = whole_rows(file)
    assert [found["step"] for found in rows] == [*kept, 4]
    assert rows[-1]["loss"] == 0.25
    assert ("lacks rows of the first 3 steps" in caplog.text) == (kept != [1, 2, 3])


@pytest.mark.parametrize("cut", range(0, len(row(3)) + 1, 5))
@pytest.mark.parametrize("harm", ["", "edited", "short"])
def test_a_row_that_waited_in_part(cut, harm, tmp_path, caplog):
    """The checkpoint has the rest of a row that a full disk cut, and further ones."""
    text, waiting = row(1) + row(2) + row(3)[:cut], row(3)[cut:] + row(4)
    edited = {"": text, "edited": text.replace("0.5", "0.512", 1), "short": text[:-1]}[harm]
    (tmp_path / "metrics.jsonl").write_text(edited)
    log = log_of(tmp_path, "latest")
    log.resume_from({"bytes": len(text), "rows": waiting}, 4)
    log.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line)["step"] for line in lines]  # each line is a row
    assert found == sorted(found)
    assert found[0] == 1
    assert found[-1] == 4 or harm == "edited"
    assert ("they are lost" in caplog.text) or found == [1, 2, 3, 4]
    assert harm or "lost" not in caplog.text


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


@pytest.fixture
def wandb(monkeypatch):
    """A fake of the parts of wandb that are called; what it was given."""
    given = SimpleNamespace(begun=[], logged=[])
    run = SimpleNamespace(
        id="abc", log=lambda row, step: given.logged.append((row, step)), finish=str
    )
    fake = SimpleNamespace(
        init=lambda **options: given.begun.append(options) or run,
        Table=lambda columns, data: (columns, data),
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return given


def test_wandb_gets_samples_as_a_table(tmp_path, wandb):
    log = MetricsLog(str(tmp_path), SFTConfig(report_to=["tensorboard", "wandb"]))
    log.write_answers(3, [{"answer": "<b>|\n", "score": 0.25}])
    log.close()
    assert wandb.logged == [({"samples": (["answer", "score"], [["<b>|\n", 0.25]])}, 3)]


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


def test_a_row_that_is_being_written_is_no_damage(tmp_path, caplog):
    (tmp_path / "log").write_text('{"step": 1}\n{"step": 2}')
    assert whole_rows(tmp_path / "log") == [{"step": 1}]
    assert not caplog.records
    (tmp_path / "log").write_text('{"step": 1}\n{"step": 1' + "0" * 400 + "}\n")
    assert whole_rows(tmp_path / "log") == [{"step": 1}]
    assert "damaged lines left out: 1" in caplog.text


def test_numbers_that_are_finite():
    assert all(map(is_finite, (0, -1.5, 10**300)))
    assert not any(map(is_finite, (True, None, "1", [1], math.nan, -math.inf, 10**400)))


def test_weights_and_biases_continues_its_run(tmp_path, wandb):
    for resume in (None, "latest", None):
        config = SFTConfig(resume=resume, report_to=["wandb"])
        MetricsLog(str(tmp_path), config).close()
    (tmp_path / ".wandb_run").unlink()
    (tmp_path / ".wandb_run").mkdir()
    with suppress(OSError):  # its id cannot be kept
        MetricsLog(str(tmp_path), SFTConfig(resume="latest", report_to=["wandb"])).close()
    assert "id" not in wandb.begun.pop()
    first, second, third = wandb.begun
    assert {"id": "abc", "resume": "allow"}.items() <= second.items()
    assert "id" not in first
    assert "id" not in third


def test_every_row_is_json(tmp_path):
    """JSON has no NaN: readers in other languages, and jq, refuse the file."""
    file = RowFile(tmp_path / "rows.jsonl", keeps_rows=False)
    file.write({"step": 1, "a": math.nan, "b": [1.5, -math.inf], "text": "NaN is text"})
    file.close()
    row = json.loads((tmp_path / "rows.jsonl").read_text(), parse_constant=pytest.fail)
    assert row == {"step": 1, "a": None, "b": [1.5, None], "text": "NaN is text"}
