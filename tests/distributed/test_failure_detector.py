"""Ranks that end in different ways, and what the others do. No torch: files are the collective."""

import contextlib
import json
import re
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from python_process import ROOT

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
        sys.exit(7)
    print(detector.first_failure(5.0))
    sys.exit(detector.first_failure().code)
assert detector.all_connected.wait(50)
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
KILLED = r"error: process {} of 3 \(pid \d+ on \S+\) ended without an exit code: .*\n"


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


def start(folder: Path, count: int, ends: str, size: int = 3) -> list[subprocess.Popen]:
    (folder / "script.py").write_text(SCRIPT)
    return [
        subprocess.Popen(
            [sys.executable, "script.py", str(rank), str(size), ends],
            cwd=folder,
            env={"PYTHONPATH": str(ROOT), "PATH": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]


def run(tmp_path: Path, ends: str) -> tuple[list[int], list[str], list[str]]:
    """Exit codes, stdout and stderr of each rank."""
    runs = start(tmp_path, 3, ends)
    hangs = runs[int(ends[0])] if ends[1:] == "fails" else None  # killed at last
    try:
        outputs = {run: run.communicate(timeout=60) for run in runs if run is not hangs}
    finally:
        for each in runs:
            each.kill()
    if hangs:
        outputs[hangs] = hangs.communicate()
    out, err = zip(*(outputs[run] for run in runs), strict=True)
    return [run.returncode for run in runs], list(out), list(err)


@pytest.mark.parametrize(
    ("ends", "codes", "printed", "said"),  # printed: by the others; said: on stderr, by rank
    [
        # One rank speaks for all.
        ("0killed", [-9, 1, 1], "", {1: KILLED.format(0)}),
        slow("1killed", [1, -9, 1], "", {0: KILLED.format(1)}),
        slow("1killed, its fork lives", [1, -9, 1], "", {0: KILLED.format(1)}),
        # Before the others connect: they learn its code, and that it has printed its error.
        slow("0fails at once", [7, 7, 7], "RankFailure(rank=0, code=7)\n", {}),
        # It prints its own error; the others do not wait until it has ended.
        slow("0fails", [-9, 7, 7], "", {}),
        slow("2fails", [7, 7, -9], "", {}),
        slow("1raises", [1, 1, 1], "", {0: KILLED.format(1), 1: r"[\s\S]*\nValueError: mine\n"}),
        slow("0announces 0", [0, 0, 0], "None\n", {}),
        slow("1returns", [0, 0, 0], "None\n", {}),
    ],
)
def test_how_one_rank_ends_and_what_the_others_do(ends, codes, printed, said, tmp_path):
    found, out, err = run(tmp_path, ends)
    assert found == codes
    assert [out[rank] for rank in range(3) if rank != int(ends[0])] == [printed] * 2
    for rank in range(3):
        assert re.fullmatch(said.get(rank, ""), err[rank])


@pytest.mark.parametrize("how", [slow("more than there are files"), "a line without end"])
def test_strangers_do_not_deafen_rank_0(how, tmp_path):
    """Connections that never say hello; then a rank connects and dies."""
    (tmp_path / "a1").write_text(json.dumps([None, "the other"]))
    (tmp_path / "b1").write_text("0")
    with start(tmp_path, 1, "1dies", size=2)[0] as detects, contextlib.ExitStack() as stack:
        stack.callback(detects.kill)
        while not (tmp_path / "a0").exists():
            assert detects.poll() is None
            time.sleep(0.01)
        (port, token), _ = json.loads((tmp_path / "a0").read_text())

        def stranger():
            return stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))

        stranger().close()
        if how == "a line without end":
            client = stranger()
            with contextlib.suppress(OSError):  # closed
                for _ in range(10_000):
                    client.sendall(b"x" * 4096)
                raise AssertionError("40 MB were taken")
        else:
            clients = [stranger() for _ in range(200)]
            for client in clients[:64]:
                assert client.recv(1) == b""  # closed
            # No file is left for a while: accept fails.
            limits = resource.prlimit(detects.pid, resource.RLIMIT_NOFILE)
            resource.prlimit(detects.pid, resource.RLIMIT_NOFILE, (3, limits[1]))
            stranger()
            time.sleep(0.3)
            resource.prlimit(detects.pid, resource.RLIMIT_NOFILE, limits)
        assert not (tmp_path / "b0").exists()  # one is missing
        rank = stranger()
        rank.sendall(f"hello {token} 1\n".encode())
        while not (tmp_path / "b0").exists():
            assert detects.poll() is None
            time.sleep(0.01)
        rank.close()
        said = detects.communicate(timeout=30)[1]
    assert detects.returncode == 1
    assert said.startswith("error: process 1 of 2 (the other) ended without an exit code")
