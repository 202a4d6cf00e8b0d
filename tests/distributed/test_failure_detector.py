"""Ranks that end in different ways, and what the others do. No torch: files are the collective."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import json, os, signal, socket, sys, time
from pathlib import Path
from dschat.distributed import failure_detector

failure_detector.EXIT_GRACE_S = 0.3
rank, size, ends = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

def gather(value, name="a"):
    Path(f"{rank}.new").write_text(json.dumps(value))
    os.rename(f"{rank}.new", f"{name}{rank}")
    while not all(Path(f"{name}{r}").exists() for r in range(size)):
        time.sleep(0.01)
    return [json.loads(Path(f"{name}{r}").read_text()) for r in range(size)]

if ends[1:] == "fails at once" and rank:
    connect = socket.create_connection
    socket.create_connection = lambda *a, **options: time.sleep(0.3) or connect(*a, **options)
detector = failure_detector.FailureDetector(rank, size, "127.0.0.1", gather)
if ends[1:] == "fails at once":
    if rank == 0:
        detector.announce_exit(7)
        os._exit(7)
    print(detector.first_failure(5.0))
    sys.exit(detector.first_failure().code)
deadline = time.monotonic() + 50
while len(detector._connections) < (size - 1 if rank == 0 else 1) and time.monotonic() < deadline:
    time.sleep(0.01)
gather(0, "b"), time.sleep(0.2)
if rank == int(ends[0]):
    match ends[1:]:
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "killed, its fork lives":
            if os.fork():
                os.kill(os.getpid(), signal.SIGKILL)
            os.close(1), os.close(2)
            time.sleep(5)
            os._exit(0)
        case "fails":
            detector.announce_exit(7)
            time.sleep(120)  # an interpreter whose teardown hangs
        case "raises":
            raise ValueError("mine")
        case "announces 0":
            detector.announce_exit(0)
        case "returns":
            pass
    sys.exit(0)
print(detector.first_failure(1.0))
time.sleep(120 if detector.first_failure() else 0)
"""
KILLED = r"error: process {} of 3 \(pid \d+ on \S+\) ended without an exit code: .*"


def run(tmp_path: Path, ends: str) -> tuple[list[int | None], list[str], list[str], float]:
    """Exit codes (None: still running), stdout and stderr of each rank, and seconds."""
    (tmp_path / "script.py").write_text(SCRIPT)
    runs = [
        subprocess.Popen(
            [sys.executable, "script.py", str(rank), "3", ends],
            cwd=tmp_path,
            env={"PYTHONPATH": str(ROOT), "PATH": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    start = time.monotonic()
    try:
        others = [run for rank, run in enumerate(runs) if rank != int(ends[0])]
        outputs = {id(run): run.communicate(timeout=60) for run in others}
        seconds = time.monotonic() - start
    finally:
        for run in runs:
            run.kill()
    outputs |= {id(run): run.communicate() for run in runs if id(run) not in outputs}
    stderr = [outputs[id(run)] for run in runs]
    return (
        [r.returncode for r in runs],
        [out for out, _ in stderr],
        [err for _, err in stderr],
        seconds,
    )


@pytest.mark.parametrize(
    ("rank", "how"),
    [
        (0, "killed"),
        pytest.param(1, "killed", marks=pytest.mark.slow),
        pytest.param(1, "killed, its fork lives", marks=pytest.mark.slow),
    ],
)
def test_a_killed_rank_ends_the_others(tmp_path, rank, how):
    codes, _, stderr, _ = run(tmp_path, f"{rank}{how}")
    assert codes == [-9 if r == rank else 1 for r in range(3)]
    speaker = 1 if rank == 0 else 0  # one rank for all
    assert re.fullmatch(KILLED.format(rank) + "\n", stderr[speaker])
    assert [stderr[r] for r in range(3) if r != speaker] == ["", ""]


def test_a_failure_before_the_others_connect(tmp_path):
    """They learn its code, and that it has printed its error."""
    codes, printed, stderr, _ = run(tmp_path, "0fails at once")
    assert codes == [7, 7, 7]
    assert printed[1:] == ["RankFailure(rank=0, code=7)\n"] * 2
    assert stderr == ["", "", ""]


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_an_announced_failure_ends_the_others_with_its_code(tmp_path, rank):
    """It prints its own error; the others do not wait until it has ended."""
    codes, printed, stderr, _ = run(tmp_path, f"{rank}fails")
    others = [r for r in range(3) if r != rank]
    assert [codes[r] for r in others] == [7, 7]
    assert stderr == ["", "", ""]


def test_an_exception_is_a_failure(tmp_path):
    codes, _, stderr, _ = run(tmp_path, "1raises")
    assert codes == [1, 1, 1]
    assert stderr[1].splitlines()[-1] == "ValueError: mine"


@pytest.mark.parametrize("how", ["0announces 0", pytest.param("1returns", marks=pytest.mark.slow)])
def test_an_exit_with_0_does_not_end_the_others(tmp_path, how):
    codes, printed, stderr, _ = run(tmp_path, how)
    others = [r for r in range(3) if r != int(how[0])]
    assert codes == [0, 0, 0]
    assert [printed[r] for r in others] == ["None\n", "None\n"]
    assert stderr == ["", "", ""]
