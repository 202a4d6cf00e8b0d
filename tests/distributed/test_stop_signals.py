"""Signals to scripts in a loop that can save; no torch."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest
from damages import DAMAGES
from python_process import environment
from quick import some

from dschat.config import UserError
from dschat.distributed import process_registry, stop_signals
from dschat.launch import supervisor

LONGEST_S = 600  # virtual machines have stood still for a minute

START = """
import ctypes, os, signal, sys, time
from pathlib import Path
from dschat.distributed import stop_signals

def ready():
    Path("ready").write_text("")

def main():
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where the tests run under nohup
    with stop_signals.handle_stop_signals(".") as stop:
BODY

try:
    main()
except stop_signals.TrainingStopped as stop:
    sys.exit(f"{stop}")
"""
LOOP = """
        ready()
        for step in range(1, 1000):
            time.sleep(0.05)
            if stop.agreed():
                raise stop_signals.TrainingStopped(step, Path("checkpoints/step_000007"))
"""
# A mutex locked twice by one thread blocks signal handlers as a collective does.
BLOCKED = """
        c, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
        c.pthread_mutex_lock(mutex)
        ready()
        c.pthread_mutex_lock(mutex)
"""


def signalled(tmp_path: Path, body: str, *signals: int, pause_s: float = 0.1) -> tuple[int, str]:
    """A script's exit code and standard error after these signals, each after the answer to the
    one before.
    """
    script = tmp_path / "script.py"
    script.write_text(START.replace("BODY", body))
    output = tmp_path / "stderr"
    with output.open("w") as stderr:
        command = [sys.executable, str(script)]
        run = subprocess.Popen(command, cwd=tmp_path, env=environment(), stderr=stderr)
    wait_until(lambda: (tmp_path / "ready").exists() or run.poll() is not None)
    for signum in signals:
        run.send_signal(signum)
        wait_until(lambda: output.read_text() or run.poll() is not None)
        time.sleep(pause_s)
    try:
        return run.wait(LONGEST_S), output.read_text()
    finally:
        run.kill()


def wait_until(holds) -> None:
    latest = time.monotonic() + LONGEST_S
    while not holds():
        assert time.monotonic() < latest
        time.sleep(0.02)


NOTICE = "stopping after this step; a second signal ends it at once\n"


@pytest.mark.parametrize(
    "signum",
    some(stop_signals.SIGNALS, [signal.SIGTERM, signal.SIGHUP]),
    ids=lambda s: s.name,
)
def test_a_signal_stops_at_the_boundary(tmp_path, signum):
    code, stderr = signalled(tmp_path, LOOP, signum)
    assert code == 1
    notice, line = stderr.splitlines()
    assert f"{notice}\n" == NOTICE
    assert re.fullmatch(r"stopped at step \d+, saved in checkpoints/step_000007", line)


def test_a_signal_that_a_launcher_repeats_is_one_request(tmp_path):
    """A launcher sends SIGTERM after the SIGINT that the terminal sent to all processes."""
    code, stderr = signalled(tmp_path, LOOP.replace("0.05", "0.5"), signal.SIGINT, signal.SIGTERM)
    assert stderr.count("stopping") == 1
    assert stderr.splitlines()[-1].startswith("stopped at step "), (code, stderr)


@pytest.mark.parametrize(
    ("signals", "pause_s", "code", "word"),
    [
        ([signal.SIGINT] * 2, 0.1, 130, "interrupted"),
        pytest.param(
            *([signal.SIGUSR1, signal.SIGTERM], stop_signals.REPEATED_S + 0.2, 143, "terminated"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["ctrl-c twice", "sigterm later"],
)
def test_a_second_signal_ends_a_blocked_loop(tmp_path, signals, pause_s, code, word):
    assert signalled(tmp_path, BLOCKED, *signals, pause_s=pause_s) == (code, f"{NOTICE}{word}\n")


def test_a_fork_handles_its_own_signals(tmp_path):
    """A reward function ends its processes by SIGTERM: not a request to stop."""
    body = """
        pid = os.fork()
        if pid == 0:
            time.sleep(20)
            os._exit(0)
        os.kill(pid, signal.SIGTERM)
        status = os.waitpid(pid, 0)[1]
        time.sleep(0.1)
        sys.stderr.write(f"{os.waitstatus_to_exitcode(status)} {stop.agreed()}")
"""
    assert signalled(tmp_path, body) == (0, "-15 False")


def test_a_fork_that_lives_on_does_not_hold_up_the_end(tmp_path):
    """A pool of a reward function holds the pipe of the signals open too."""
    body = """
        pid = os.fork()
        if pid == 0:
            os.close(1), os.close(2)
            time.sleep(100)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
        is_requested = stop.agreed()
    os.kill(pid, signal.SIGKILL)
    sys.stderr.write(f"{is_requested}")
"""
    began = time.monotonic()
    assert signalled(tmp_path, body) == (0, f"{NOTICE}True")
    assert time.monotonic() - began < 60


def test_stderr_without_a_reader(tmp_path):
    """The same Ctrl-C ended `| tee`: training still stops with a checkpoint."""
    body = """
        from dschat.observability import console
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, 2)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        console.setup()
        console.logger.info("step 1")
        Path("after").write_text(f"{stop.agreed()}")
"""
    signalled(tmp_path, body)
    assert (tmp_path / "after").read_text() == "True"


def test_handlers_are_restored_after_the_scope(tmp_path):
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    handlers = [signal.getsignal(s) for s in stop_signals.SIGNALS]
    try:
        with stop_signals.handle_stop_signals(tmp_path) as stop:
            signal.raise_signal(signal.SIGUSR1)  # stays ignored
            time.sleep(0.05)
            assert not stop.agreed()
            assert signal.getsignal(signal.SIGTERM) not in handlers
        assert [signal.getsignal(s) for s in stop_signals.SIGNALS] == handlers
        assert "signals" not in [thread.name for thread in threading.enumerate()]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_nested_scope_leaves_signals_to_the_outer_one(tmp_path):
    with stop_signals.handle_stop_signals(tmp_path) as stop:
        with stop_signals.handle_stop_signals(tmp_path) as inner:
            signal.raise_signal(signal.SIGTERM)
            wait_until(stop.agreed)
        assert (stop.agreed(), inner.agreed()) == (True, False)


def test_nothing_is_requested_outside_the_main_thread(tmp_path):
    def loop():
        with stop_signals.handle_stop_signals(tmp_path) as stop:
            return stop.agreed()

    with ThreadPoolExecutor() as pool:
        assert pool.submit(loop).result() is False


# The process registry


def test_the_registry_lists_the_processes_in_the_loop(tmp_path):
    out = tmp_path / "out" / "step"
    with process_registry.opened(out) as ranks:
        assert ranks.here() == []
        with stop_signals.handle_stop_signals(out):
            assert ranks.here() == [os.getpid()]
        assert ranks.here() == []
        assert not ranks.stopped
        with pytest.raises(stop_signals.TrainingStopped), stop_signals.handle_stop_signals(out):
            raise stop_signals.TrainingStopped(3, None)
        assert ranks.stopped
    assert not (tmp_path / "out").exists()
    with stop_signals.handle_stop_signals(tmp_path):  # without a registry nothing is left
        assert list(tmp_path.iterdir()) == []


def test_a_registry_has_one_holder_for_each_machine(tmp_path):
    name = f"{socket.gethostname()}@{os.getpid()}"
    ranks = process_registry.ProcessRegistry(tmp_path / ".ranks")
    assert ranks.holder() is None
    with process_registry.opened(tmp_path):
        assert ranks.holder() == (name, True)
        with pytest.raises(BlockingIOError), process_registry.opened(tmp_path):
            pass
        assert ranks.holder(1) is None
        with process_registry.opened(tmp_path, machine=1):
            assert ranks.holder(1) == (name, True)
    assert ranks.holder() is None


def test_the_registry_removes_entries_of_killed_processes(tmp_path):
    (tmp_path / "kept").write_text("")
    with process_registry.opened(tmp_path) as ranks:
        with process_registry.registered(tmp_path):
            (entry,) = (tmp_path / process_registry.FOLDER).glob("*@*")
            content = entry.read_text()
            if content:  # where /proc exists
                entry.write_text(f"{content}0")
                assert ranks.here() == []  # another process had this id
            entry.write_text(content)
            assert ranks.here() == [os.getpid()]
        dead = subprocess.Popen([sys.executable, "-c", ""])
        host = entry.name.rpartition("@")[0]
        for name in (f"{host}@{dead.pid}", "elsewhere@1"):
            (tmp_path / process_registry.FOLDER / name).write_text("17")
        dead.wait()
        assert ranks.here() == []
        assert ranks.elsewhere()
        ranks.remove_stale()
        assert [p.name for p in (tmp_path / process_registry.FOLDER).glob("*@*")] == ["elsewhere@1"]
    assert [p.name for p in tmp_path.iterdir()] == ["kept"]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["train0", "stopped", f"{socket.gethostname()}@17", "a@17"])
def test_damaged_registries_are_a_line_and_no_wait(name, damage, tmp_path):
    """Left by a run that was killed; who starts the next one looks at them first."""
    folder = tmp_path / process_registry.FOLDER
    folder.mkdir()
    path = folder / name
    path.write_text(f"{socket.gethostname()}@{os.getpid()} 12345")
    DAMAGES[damage](path)
    (folder / os.fsdecode(b"\xff@\xff")).write_text("")
    (folder / f"{socket.gethostname()}@x").write_text("")
    (folder / f"{socket.gethostname()}@{'9' * 150}").write_text("17")
    assert supervisor.wait_until_free(tmp_path) is False
    if name == "train0" and damage in ("folder", "broken link", "pipe"):
        with pytest.raises(OSError, match="train0"), process_registry.opened(tmp_path):
            pass
        return
    with process_registry.opened(tmp_path) as ranks:
        assert ranks.here() == []
        assert not ranks.stopped
    assert list(tmp_path.iterdir()) == []


def test_a_registry_that_cannot_be_made_is_a_line(tmp_path):
    (tmp_path / process_registry.FOLDER).write_text("")
    with pytest.raises(UserError, match=r"\.ranks: File exists; remove it, or choose another"):
        supervisor.ProcessSupervisor().run(["true"], {}, tmp_path, Mock(number_here=0))
