"""Trackers of experiments: trackio and MLflow themselves, where installed, with local stores."""

import sys
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from dschat.config import SFTConfig, UserError
from dschat.observability.trackers import Trackers, check_trackers

SETTINGS = asdict(SFTConfig(data_path=["a", "b"]))
TABLE = [{"prompt": "<b>|\n", "score": 0.25}, {"prompt": "c", "score": None}]


def logged(name, folder):
    """A run that is stopped after two steps, and its continuation with other settings."""
    for is_resumed in (False, True):
        trackers = Trackers([name])
        trackers.tell("start", folder, SETTINGS | {"seed": 1 + is_resumed}, is_resumed)
        for step in (3, 4) if is_resumed else (1, 2):
            trackers.tell("write", step, {"loss": 1 / step, "eval/pass@1": 0.5})
            trackers.tell("write_answers", step, TABLE)
        trackers.tell("close")
    return (folder / f".{name}_run").read_text()


def test_trackio(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    run = logged("trackio", tmp_path)
    assert SQLiteStorage.get_runs("dschat") == [run]
    rows = SQLiteStorage.get_logs("dschat", run)
    assert [row["loss"] for row in rows if "loss" in row] == [1, 1 / 2, 1 / 3, 1 / 4]
    assert [row["step"] for row in rows if "eval/pass@1" in row] == [1, 2, 3, 4]
    tables = [row["samples"]["_value"] for row in rows if "samples" in row]
    assert tables == [TABLE] * 4
    assert not caplog.records


def test_mlflow(tmp_path, monkeypatch, caplog):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    run = mlflow.get_run(logged("mlflow", tmp_path))
    client = mlflow.MlflowClient()
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(m.step, m.value) for m in history] == [(n, 1 / n) for n in (1, 2, 3, 4)]
    assert run.data.metrics["eval/pass_1"] == 0.5
    assert run.data.params.keys() == SETTINGS.keys()
    assert run.data.params["seed"] == "1"
    samples = mlflow.artifacts.load_dict(f"{run.info.artifact_uri}/samples/4.json")
    assert samples == {"samples": TABLE}
    assert not [record for record in caplog.records if record.name == "dschat"]


@pytest.mark.parametrize("when", ["init", "log", "finish"])
def test_a_tracker_that_fails_is_turned_off(when, tmp_path, monkeypatch, caplog):
    calls = []

    def called(name, result=None):
        calls.append(name)
        if name == when:
            raise RuntimeError("no route to host")
        return result

    run = SimpleNamespace(
        id="a", log=lambda *_, **__: called("log"), finish=lambda: called("finish")
    )
    fake = SimpleNamespace(init=lambda **_: called("init", run))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    trackers = Trackers(["tensorboard", "wandb"])
    trackers.tell("start", tmp_path, {}, False)
    for step in (1, 2):
        trackers.tell("write", step, {"loss": 1.0})
    trackers.tell("close")
    assert caplog.messages == ["wandb is off from here on: no route to host"]
    assert calls.count("log") == {"init": 0, "log": 1, "finish": 2}[when]


@pytest.mark.parametrize("name", ["wandb", "trackio", "mlflow"])
def test_what_is_not_installed_is_named(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=rf"--report_to {name} .* `pip install dschat\[{name}\]`"):
        check_trackers(["tensorboard", name])
    check_trackers(["tensorboard", "none"])
