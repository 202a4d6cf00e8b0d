"""Faults of a real run: signals, a full disk, NaN, a dead rank, damaged files.

After each of them the run continues or resumes, and records the same as an undisturbed one.
"""

import os
import re
import shutil
import signal
import time
from pathlib import Path

import forked
import pytest
from cases import STEP1
from orphans import train_py
from runs import (
    TIMEOUT_S,
    Case,
    check_same,
    finish,
    num_rows,
    processes_of,
    ran,
    rows,
    start,
)

PPO = Case(3, "--kl_coef 0.1", ranks=2)
# Without the dynamic sampling of `GRPO`: where that keeps no answer, their means are NaN.
GRPO_ZERO3 = Case(3, "--advantage_estimator grpo --kl_coef 0.1 --actor_zero_stage 3", ranks=2)
slow = pytest.mark.slow


# -- Files that are not what was written


@pytest.fixture(scope="module")
def cut_short(models, tmp_path_factory):
    """A run that was killed in its last step; it left the checkpoints of steps 4 and 6."""
    out = tmp_path_factory.mktemp("cut_short") / "run"
    outcome = forked.run(
        *STEP1.command(models, out)[1:],
        variables={"FAULT": "hang_in_step 7 0"},
        signum=signal.SIGKILL,
        after_file=str(out / "checkpoints/step_000006/manifest.json"),
    )
    assert outcome.code == -signal.SIGKILL, outcome.stderr[-3000:]
    assert sorted(os.listdir(out / "checkpoints"))[-2:] == ["step_000004", "step_000006"]
    return out


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@slow
def test_no_checkpoint_is_complete(cut_short, whole, models, tmp_path):
    """The step does not restart without --overwrite_output_dir."""
    out = tmp_path / "run"
    shutil.copytree(cut_short, out)
    for folder in (out / "checkpoints").iterdir():
        flipped(folder / "manifest.json")
    line = ran(STEP1, models, out, code=2).splitlines()[-1]
    assert re.search(
        r"error: --resume latest: no checkpoint in .* is complete .*restart with", line
    )
    restart = [*STEP1.command(models, out), "--overwrite_output_dir"]
    assert finish(restart, tmp_path / "restart.log") == 0
    check_same(out, whole(STEP1))


# -- Disks


def test_a_disk_that_is_too_small_for_checkpoints(whole, models, tmp_path):
    """By a limit on a file's size: what the step saves at its end fits."""
    largest = max(p.stat().st_size for p in whole(STEP1).rglob("*.safetensors"))
    said = ran(STEP1, models, tmp_path / "run", FAULT=f"small_files {largest + 4096}")
    assert said.count("could not be written") == 1, said
    assert "File too large" in said
    assert not any((tmp_path / "run/checkpoints").iterdir())
    check_same(tmp_path / "run", whole(STEP1))


# -- Numbers


@slow
@pytest.mark.dist
@pytest.mark.parametrize(
    ("case", "fault", "what"),
    [
        (PPO, "nan_scores 2 1", "1 scores not finite"),
        (PPO, "nan_logprobs 2 1", "1 log-probs of the reference not finite"),
        (GRPO_ZERO3, "nan_logprobs 2 0", "1 log-probs of the reference not finite"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_nan_in_a_rollout_is_not_learned_from(case, fault, what, models, tmp_path):
    said = ran(case, models, tmp_path / "run", FAULT=fault)
    assert f"iteration 1: the update skipped: {what}" in said
    steps = [row for row in rows(tmp_path / "run") if "train/bad_steps" in row]
    assert [row["train/bad_steps"] for row in steps] == [0, 1, 0, 0, 0, 0]
    assert "NaN" not in steps[2].values()


# -- Processes


@slow
@pytest.mark.dist
@pytest.mark.parametrize("zero", [0, 3])
def test_a_rank_that_is_killed(zero, whole, models, tmp_path):
    case, out = Case(1, f"--zero_stage {zero}", ranks=2), tmp_path / "run"
    log, command = out.with_suffix(".log"), case.command(models, out)
    process = start(command, log, FAULT="die_in_step 5 1")
    while process.poll() is None and len(processes_of(out)) != 2:  # the launcher's own, and a rank
        time.sleep(0.05)
    while process.poll() is None and len(processes_of(out)) > 2:
        time.sleep(0.05)
    assert process.wait(TIMEOUT_S) != 0
    assert not processes_of(out)
    assert "error: process 1 of 2" in log.read_text() or "exitcode" in log.read_text()
    ran(case, models, out)
    check_same(out, whole(case))


@slow
@pytest.mark.parametrize(
    ("signum", "ranks"),
    [
        (signal.SIGTERM, 1),
        (signal.SIGINT, 1),
        pytest.param(signal.SIGTERM, 2, marks=pytest.mark.dist),
        pytest.param(signal.SIGINT, 2, marks=pytest.mark.dist),
    ],
)
def test_train_py_stops_and_resumes(signum, ranks, models, tmp_path):
    """SIGTERM to train.py, as a scheduler sends it; Ctrl-C to all that the terminal runs."""
    whole, out = tmp_path / "whole", tmp_path / "out"
    log = tmp_path / "log"
    assert finish(train_py(models, whole, ranks=ranks), log) == 0, log.read_text()[-3000:]
    log = tmp_path / "stopped.log"
    process = start(train_py(models, out, ranks=ranks), log)
    while num_rows(out / "step1_sft") < 5 and process.poll() is None:
        time.sleep(0.01)
    if signum == signal.SIGINT:
        os.killpg(process.pid, signum)
    else:
        process.send_signal(signum)
    assert process.wait(60) == 75, log.read_text()[-3000:]
    assert re.fullmatch(
        r"stopped in step 1, saved in \S+/step_0000\d\d; the same command resumes from there",
        log.read_text().splitlines()[-1],
    )
    assert not processes_of(out / "step1_sft")
    assert finish(train_py(models, out, ranks=ranks), log) == 0, log.read_text()[-3000:]
    assert "resumes from" in log.read_text()
    check_same(out / "step1_sft", whole / "step1_sft")
