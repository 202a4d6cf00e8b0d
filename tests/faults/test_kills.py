"""A step that is killed at any moment and resumed records the same as an undisturbed one."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cases import STEP1, SWEEP
from orphans import run_whole, survive_alone, train_py
from runs import check_same, finish, ran, rows, survive

pytestmark = pytest.mark.slow  # checkpoint/test_protocol.py kills a writer at every operation


def test_killed_at_given_points(whole, models, tmp_path):
    """Within a checkpoint's files, before its rename, and in steps."""
    out = tmp_path / "run"
    for fault in ("die_in_step 2 0", "die_writing 5", "die_renaming 2", "die_in_step 3 0"):
        ran(STEP1, models, out, code=-signal.SIGKILL, FAULT=fault)
    ran(STEP1, models, out)
    check_same(out, whole(STEP1))


def test_a_disk_that_is_too_small_for_checkpoints(whole, models, tmp_path):
    """By a limit on a file's size: what the step saves at its end fits."""
    largest = max(p.stat().st_size for p in whole(STEP1).rglob("*.safetensors"))
    said = ran(STEP1, models, tmp_path / "run", FAULT=f"small_files {largest + 4096}")
    assert said.count("could not be written") == 1, said
    assert "File too large" in said
    assert not any((tmp_path / "run/checkpoints").iterdir())
    check_same(tmp_path / "run", whole(STEP1))


@pytest.mark.parametrize("case", SWEEP, ids=lambda c: c.name)
def test_killed_and_resumed(case, models, tmp_path):
    whole = tmp_path / "whole"
    command, log = case.command(models, whole), tmp_path / "whole.log"
    assert finish(command, log) == 0, log.read_text()[-3000:]
    expected = rows(whole)
    steps = [row["step"] for row in expected if not any(name.startswith("eval") for name in row)]
    assert len(set(steps)) == len(steps) >= 6
    killed = survive(case, models, tmp_path / "killed", whole, kills=2, seed=case.name)
    assert killed.total() >= 1


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.dist)])
def test_train_py_alone_is_killed(ranks, models, tmp_path):
    """Its step ends with it, launchers too, and the same command, started at once, waits."""
    seconds = run_whole(train_py(models, tmp_path / "whole", ranks=ranks))
    command = train_py(models, tmp_path / "killed", ranks=ranks)
    assert survive_alone(command, tmp_path / "whole", seconds, kills=2, seed="2") >= 1


def test_the_sweep_starts_as_a_script():
    """It needs no pytest, which puts the modules that tests share on the path."""
    sweep = Path(__file__).with_name("sweep.py")
    result = subprocess.run([sys.executable, sweep, "--help"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "--kills" in result.stdout
