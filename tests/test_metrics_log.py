"""metrics.jsonl of a run that goes on: no gap, and nothing twice."""

import json

import pytest

from dschat.config import SFTConfig, UserError
from dschat.log import MetricsLog


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
    position = log.position
    assert position == (tmp_path / "metrics.jsonl").stat().st_size
    log.write(3, {"loss": 0.5})  # and the process is killed here
    log = log_of(tmp_path, "latest", tensorboard)
    log.write(0, {"eval/gold": 0.0})  # before it is known where to go on
    log.go_on_from(position, 2)
    assert log.position == position
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
        log.go_on_from(100, 2)
    log.close()
