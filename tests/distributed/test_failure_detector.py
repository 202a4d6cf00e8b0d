"""Ranks that end in different ways, and what the others do. No torch: files are the collective."""

import contextlib
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dschat.distributed import failure_detector

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


@pytest.mark.parametrize("how", ["more than there are files", "a line without end"])
def test_strangers_do_not_deafen_rank_0(how, monkeypatch):
    """Connections that never say hello; then a rank connects and dies."""
    shared, exits = {}, threading.Event()
    monkeypatch.setattr(failure_detector.FailureDetector, "_exit", lambda self: exits.set())
    monkeypatch.setattr(failure_detector.atexit, "register", lambda _: None)

    def gather(value):
        shared["port"], shared["token"] = value[0]
        return [value, (None, "the other")]

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    detector = failure_detector.FailureDetector(0, 2, "127.0.0.1", gather)
    address = "127.0.0.1", shared["port"]
    with contextlib.ExitStack() as stack:

        def stranger():
            return stack.enter_context(socket.create_connection(address, timeout=30))

        if how == "a line without end":
            client = stranger()
            with contextlib.suppress(OSError):  # closed
                for _ in range(10_000):
                    client.sendall(b"x" * 4096)
                raise AssertionError("40 MB were taken")
        else:
            clients = [stranger() for _ in range(3 * failure_detector._MAX_STRANGERS)]
            for client in clients[: failure_detector._MAX_STRANGERS]:
                assert client.recv(1) == b""  # closed
            # No file is left for a while: accept fails.
            used = max(map(int, (path.name for path in Path("/proc/self/fd").iterdir())))
            waiting = socket.socket()
            stack.enter_context(waiting)
            resource.setrlimit(resource.RLIMIT_NOFILE, (used, hard))
            waiting.connect(address)
            time.sleep(0.3)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert not detector._all_connected.is_set()
        rank = stranger()
        rank.sendall(f"hello {shared['token']} 1\n".encode())
        assert detector._all_connected.wait(30)
        rank.close()
        assert exits.wait(30)
        assert detector._failure == failure_detector.RankFailure(1, None)
