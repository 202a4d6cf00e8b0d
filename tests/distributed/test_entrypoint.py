"""Exit codes and error lines of scripts, of one process and of the ranks of one run."""

import errno
import os
import signal
import sys
import time
from pathlib import Path

import pytest

import dschat.distributed as dist
from dschat.config import UserError
from dschat.distributed import entrypoint, host_checks, stop_signals
from dschat.distributed.failure_detector import RankFailure


def exits_with(main, capsys, joins_group=True) -> tuple[int, str]:
    with pytest.MonkeyPatch.context() as patch:
        # An earlier test may have joined a process group: the real one would then end this process.
        patch.setattr(dist, "exit_process", sys.exit)
        with pytest.raises(SystemExit) as stop:
            entrypoint.run(main, joins_group)
    return stop.value.code, capsys.readouterr().err


def raises(error: BaseException):
    def main():
        raise error

    return main


def test_exit_codes(capsys):
    assert exits_with(lambda: None, capsys) == (0, "")
    assert exits_with(lambda: 7, capsys) == (7, "")
    assert exits_with(raises(UserError("--x is\nwrong")), capsys) == (2, "error: --x is wrong\n")
    assert exits_with(raises(KeyboardInterrupt()), capsys) == (130, "interrupted\n")
    assert exits_with(raises(FloatingPointError("nan")), capsys) == (1, "error: nan\n")
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "out/metrics.jsonl")
    line = "error: no space left on the disk: out/metrics.jsonl; free some, then run the same "
    assert exits_with(raises(full), capsys) == (2, f"{line}command again\n")


@pytest.mark.parametrize("joins_group", [True, False])
def test_a_command_that_joins_no_group_prints_whatever_its_rank(
    joins_group, capsys, variables, monkeypatch
):
    """As train.py under a launcher that sets RANK."""
    monkeypatch.setattr(entrypoint, "SAME_ERROR_S", 0.0)
    monkeypatch.setattr(host_checks, "check", lambda: None)
    variables(MASTER_ADDR="x", RANK="1", WORLD_SIZE="2")
    code, printed = exits_with(raises(UserError("--x is wrong")), capsys, joins_group)
    assert (code, printed) == (2, "" if joins_group else "error: --x is wrong\n")


def test_stopped_training_says_how_to_resume(capsys, monkeypatch):
    monkeypatch.setattr(
        dist, "shutdown", lambda: None
    )  # other tests of this process need the group
    saved = stop_signals.TrainingStopped(7, Path("out/checkpoints/step_000007"))
    line = "stopped at step 7, saved in out/checkpoints/step_000007; "
    line += "the same command with --resume latest resumes from there\n"
    assert exits_with(raises(saved), capsys) == (75, line)
    line = "stopped at step 7, nothing is saved\n"
    assert exits_with(raises(stop_signals.TrainingStopped(7, None)), capsys) == (75, line)
    monkeypatch.setenv(entrypoint.LAUNCHED_BY, "1")
    assert exits_with(raises(saved), capsys) == (75, "")


def test_the_first_failure_is_the_one_shown(capsys, variables, monkeypatch):
    variables(MASTER_ADDR="127.0.0.1", WORLD_SIZE="2")
    code, said = exits_with(raises(RuntimeError("mine")), capsys)
    assert code == 1
    assert said.splitlines()[-1].endswith("RuntimeError: mine")  # torch may name the rank before
    monkeypatch.setattr(dist, "first_failure", lambda wait_s: RankFailure(1, 3))
    assert exits_with(raises(RuntimeError("connection closed")), capsys) == (3, "")
    monkeypatch.setattr(dist, "first_failure", lambda wait_s: RankFailure(1, None))
    assert exits_with(raises(RuntimeError("connection closed")), capsys) == (1, "")


def test_sigterm_is_one_line_unless_train_py_speaks(capsys, monkeypatch):
    def terminated():
        signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    assert exits_with(terminated, capsys) == (143, "terminated\n")
    monkeypatch.setenv(entrypoint.LAUNCHED_BY, str(os.getppid()))
    assert exits_with(terminated, capsys) == (143, "")
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_bug_keeps_its_traceback():
    with pytest.raises(ValueError, match="ours"):
        entrypoint.run(raises(ValueError("ours")))


def test_only_the_main_process_speaks(capsys, variables, monkeypatch):
    variables(MASTER_ADDR="127.0.0.1", WORLD_SIZE="2", RANK="1")
    waited = []
    monkeypatch.setattr(time, "sleep", waited.append)
    assert exits_with(raises(UserError("--x is wrong")), capsys) == (2, "")
    assert waited  # rank 0 gets to speak before the launcher stops it
    assert exits_with(raises(KeyboardInterrupt()), capsys) == (130, "")
    # ... unless rank 0 sees nothing wrong
    monkeypatch.setattr(dist, "is_watched", lambda: True)
    monkeypatch.setattr(dist, "first_failure", lambda wait_s: RankFailure(0, 2))
    assert exits_with(raises(UserError("--x is wrong")), capsys) == (2, "")
    monkeypatch.setattr(dist, "first_failure", lambda wait_s: None)
    alone = "error: process 1: --x is wrong\n"
    assert exits_with(raises(UserError("--x is wrong")), capsys) == (2, alone)
