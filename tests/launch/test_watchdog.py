"""A train.py that was killed: the watchdog stops its step, and a restart waits for that."""

import json
import os
import signal
import socket
from pathlib import Path

import psutil
import pytest
from stub_steps import QUIET, alive, in_loop, plan, start_train, wait_for

from dschat.config import UserError
from dschat.launch import watchdog

AGAIN = (*QUIET, "--resume", "latest")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.parametrize(
    "ranks", [1, pytest.param(2, marks=pytest.mark.dist)], ids="{} ranks".format
)
def test_a_killed_train_py_stops_its_step(tree, ranks, capfd):
    """The step saves, launchers exit, and the same command waits for that."""
    run, pids = in_loop("--num-gpus", str(ranks), ranks=ranks, STEP_S="0.5")
    group = os.getpgid(pids[0])
    run.kill()
    run.wait()
    note = plan(tree, *AGAIN, "--num-gpus", str(ranks)).notes[0]
    assert not watchdog.lives(group)
    assert not any(alive(pid) for pid in pids)
    (folder,) = Path("out/step1_sft/checkpoints").iterdir()
    assert note.startswith(f"step 1 resumes from {folder}")
    assert not Path("out/step1_sft/.ranks").exists()
    line = "waiting: processes of a killed train.py still write to out/step1_sft\n"
    assert capfd.readouterr().err == line


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_a_train_py_killed_while_a_model_loads(tree):
    """There is nothing to save, and no checkpoint."""
    run = start_train(HANG="step1_sft")
    pids = Path("out/step1_sft/pids")
    assert wait_for(pids.exists, 60)
    run.kill()
    run.wait()
    plan(tree, *AGAIN)
    assert not any(alive(pid) for pid in json.loads(pids.read_text()))


def test_a_folder_that_another_run_writes(tree):
    run, pids = in_loop()
    name = f"{socket.gethostname()}@{run.pid}"
    with pytest.raises(UserError, match=rf"out/step1_sft is .* another train.py \({name}\)"):
        plan(tree, *AGAIN)
    children = psutil.Process(run.pid).children()
    for process in [*(child for child in children if child.pid not in pids), run]:
        process.kill()  # the watchdog first
    run.wait()
    try:
        with pytest.raises(UserError, match=rf"train.py was killed \(process {pids[0]}\); stop"):
            plan(tree, *AGAIN)
    finally:
        os.kill(pids[0], signal.SIGKILL)
    assert wait_for(lambda: not alive(pids[0]), 60)
    assert plan(tree, *AGAIN).commands
