"""Exit codes and error lines of scripts, of one process and of the ranks of one run."""

import time

import forked
import pytest

from dschat.distributed.stop_signals import LAUNCHED_BY

SCRIPT = """
import errno, os, signal
from pathlib import Path
from types import SimpleNamespace
import dschat.distributed as dist
from dschat.config import UserError
from dschat.distributed import entrypoint, failure_detector
from dschat.distributed.failure_detector import RankFailure
from dschat.distributed.stop_signals import LAUNCHED_BY, TrainingStopped

def another_rank(failure):
    detector = SimpleNamespace(first_failure=lambda wait_s: failure, announce_exit=lambda code: 0)
    failure_detector.watch(detector)

def main():
    BODY

entrypoint.SAME_ERROR_S = 1.0
before = signal.getsignal(signal.SIGTERM)
try:
    entrypoint.run(main, JOINS_GROUP)
finally:
    assert signal.getsignal(signal.SIGTERM) is before
"""
WRONG, LOST = "raise UserError('--x is wrong')", "raise RuntimeError('connection closed')"
FULL = "raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), 'out/metrics.jsonl')"
FIRST = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2"}
SECOND = FIRST | {"RANK": "1"}
TERMINATED = "signal.raise_signal(signal.SIGTERM)"
BY_TRAIN_PY = f"os.environ[LAUNCHED_BY] = str(os.getppid()); {TERMINATED}"
SAVED = "raise TrainingStopped(7, Path('out/checkpoints/step_000007'))"
STOPPED = "stopped at step 7, saved in out/checkpoints/step_000007; "
STOPPED += "the same command with --resume latest resumes from there\n"


NEXT = "entrypoint.say_next(['chat', '--path', '/my out/actor'], ['report', 'out'])"
SAID = "next: python -m dschat chat --path '/my out/actor'\nnext: python -m dschat report out\n"


def exits_with(body, variables, joins_group=True):
    script = SCRIPT.replace("BODY", body).replace("JOINS_GROUP", str(joins_group))
    done = forked.run("-c", script, variables=variables)
    return done.code, done.stderr


@pytest.mark.parametrize(
    ("body", "variables", "code", "line"),
    [
        ("return", {}, 0, ""),
        ("return 7", {}, 7, ""),
        (NEXT, {}, 0, SAID),
        (NEXT, {LAUNCHED_BY: "1"}, 0, ""),
        ("raise UserError('--x is\\nwrong')", {}, 2, "error: --x is wrong\n"),
        ("raise KeyboardInterrupt", {}, 130, "interrupted\n"),
        ("raise KeyboardInterrupt", SECOND, 130, ""),
        ("raise FloatingPointError('nan')", {}, 1, "error: nan\n"),
        ("raise UserError('\\x1b]0;a\\x07b')", {}, 2, "error: \\x1b]0;a\\x07b\n"),
        ("raise FloatingPointError('\\x1b[2J')", {}, 1, "error: \\x1b[2J\n"),
        (
            *(FULL, {}, 2),
            "error: no space left on the disk: out/metrics.jsonl; free some, then run the same "
            "command again\n",
        ),
        (SAVED, {}, 75, STOPPED),
        ("raise TrainingStopped(7, None)", {}, 75, "stopped at step 7, nothing is saved\n"),
        (SAVED, {LAUNCHED_BY: "1"}, 75, ""),
        (TERMINATED, {}, 143, "terminated\n"),
        (BY_TRAIN_PY, {}, 143, ""),  # which prints the line
        # The first failure is the one shown.
        (f"another_rank(RankFailure(1, 3)); {LOST}", FIRST, 3, ""),
        (f"another_rank(RankFailure(1, None)); {LOST}", FIRST, 1, ""),
        # Only rank 0 prints a mistake, unless it sees nothing wrong.
        (f"another_rank(RankFailure(0, 2)); {WRONG}", SECOND, 2, ""),
        (f"another_rank(None); {WRONG}", SECOND, 2, "error: process 1: --x is wrong\n"),
    ],
)
def test_exit_code_and_line(body, variables, code, line):
    assert exits_with(body, variables) == (code, line)


@pytest.mark.slow
def test_another_rank_exits_after_rank_0_had_time_to_print():
    """Or the launcher stops that first."""
    began = time.monotonic()
    assert exits_with(WRONG, SECOND) == (2, "")
    assert time.monotonic() - began >= 1.0


def test_a_command_that_joins_no_group_prints_whatever_its_rank():
    """As train.py under a launcher that sets RANK."""
    assert exits_with(WRONG, SECOND, joins_group=False) == (2, "error: --x is wrong\n")


@pytest.mark.parametrize("variables", [{}, FIRST])
def test_a_bug_keeps_its_traceback(variables):
    code, said = exits_with("raise ValueError('ours')", variables)
    assert code == 1
    assert "Traceback" in said
    assert said.splitlines()[-1].endswith("ValueError: ours")  # torch may name the rank before
