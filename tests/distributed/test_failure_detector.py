"""Processes that end, each in its way, and what becomes of the others. No torch: a folder is their
collective.
"""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
from dschat.distributed import failure_detector as lifeline

detector.PATIENCE_S = 0.3
rank, size, ends = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

def gather(value, name="a"):
    Path(f"{rank}.new").write_text(json.dumps(value))
    os.rename(f"{rank}.new", f"{name}{rank}")
    while not all(Path(f"{name}{r}").exists() for r in range(size)):
        time.sleep(0.01)
    return [json.loads(Path(f"{name}{r}").read_text()) for r in range(size)]

line = detector.FailureDetector(rank, size, "127.0.0.1", gather)
deadline = time.monotonic() + 50
while len(line._connections) < (size - 1 if rank == 0 else 1) and time.monotonic() < deadline:
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
            line.announce_exit(7)
            time.sleep(120)  # as an interpreter that does not come to its end
        case "raises":
            raise ValueError("mine")
        case "leaves":
            line.announce_exit(0)
        case "ends":
            pass
    sys.exit(0)
print(line.first_failure(1.0))
time.sleep(120 if line.first_failure() else 0)
"""
GONE = r"error: process {} of 3 \(pid \d+ on \S+\) is gone without a word: .*"


def run(tmp_path: Path, ends: str) -> tuple[list[int | None], list[str], list[str], float]:
    """Exit codes (None: still there), what each printed, what each said, and seconds."""
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
    said = [outputs[id(run)] for run in runs]
    return [r.returncode for r in runs], [out for out, _ in said], [err for _, err in said], seconds


@pytest.mark.parametrize(
    ("rank", "how"), [(0, "killed"), (1, "killed"), (1, "killed, its fork lives")]
)
def test_a_death_ends_the_others(tmp_path, rank, how):
    codes, _, said, _ = run(tmp_path, f"{rank}{how}")
    assert codes == [-9 if r == rank else 1 for r in range(3)]
    speaker = 1 if rank == 0 else 0  # one for all
    assert re.fullmatch(GONE.format(rank) + "\n", said[speaker])
    assert [said[r] for r in range(3) if r != speaker] == ["", ""]


@pytest.mark.parametrize("rank", [0, 2])
def test_a_failure_ends_the_others_with_its_code_and_without_a_word(tmp_path, rank):
    """It has spoken itself; that it does not come to its end keeps nobody waiting."""
    codes, printed, said, _ = run(tmp_path, f"{rank}fails")
    others = [r for r in range(3) if r != rank]
    assert [codes[r] for r in others] == [7, 7]
    assert said == ["", "", ""]


def test_an_exception_is_a_death(tmp_path):
    codes, _, said, _ = run(tmp_path, "1raises")
    assert codes == [1, 1, 1]
    assert said[1].splitlines()[-1] == "ValueError: mine"


@pytest.mark.parametrize("how", ["0leaves", "1ends"])
def test_who_leaves_in_peace_takes_nobody_along(tmp_path, how):
    codes, printed, said, _ = run(tmp_path, how)
    others = [r for r in range(3) if r != int(how[0])]
    assert codes == [0, 0, 0]
    assert [printed[r] for r in others] == ["None\n", "None\n"]
    assert said == ["", "", ""]
