"""Watchdog: terminates a step's processes when the train.py that started them was killed.

    python -m dschat.launch.watchdog OUT/<step>/.ranks

A separate process beside each step. It waits at a pipe that train.py holds open: the kernel closes
the pipe however train.py exits, SIGKILL included. It terminates the process group of the step,
launchers included, and holds the lock of the process registry until the last process has exited,
so that a restarted train.py waits.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from dschat.distributed.process_registry import ProcessRegistry
from dschat.distributed.stop_signals import SIGNALS

GRACE_S = 20.0  # for processes to save and exit, and again between SIGTERM and SIGKILL
LONGEST_S = 2 * GRACE_S + 10.0


@contextmanager
def watched(ranks: ProcessRegistry, environment: Mapping[str, str]) -> Iterator[Callable[[], None]]:
    """Run a watchdog during the block. Yields a ``preexec_fn`` for the step's process: it
    announces the process group to the watchdog before the step's command starts.
    """
    reader, writer = os.pipe()  # NOTE not inherited: the step would keep the pipe open
    dog = subprocess.Popen(
        [sys.executable, "-m", "dschat.launch.watchdog", str(ranks.folder)],
        env=environment,
        stdin=reader,
        stdout=subprocess.DEVNULL,
        pass_fds=ranks.descriptors,
        start_new_session=True,
    )
    os.close(reader)

    def announce() -> None:
        os.write(writer, b"%d" % os.getpid())

    try:
        yield announce
    finally:
        dog.kill()
        dog.wait()
        os.close(writer)


def main() -> None:
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_IGN)  # train.py handles them
    ranks = ProcessRegistry(Path(sys.argv[1]))
    group = sys.stdin.read()  # EOF: train.py has exited
    if group:
        with suppress(OSError):
            sys.stderr.write("train.py was killed; terminating the processes of its step\n")
        _terminate(int(group), ranks)
    ranks.remove()


def _terminate(group: int, ranks: ProcessRegistry) -> None:
    """SIGTERM to registered processes first, so that they save; then to the group; then SIGKILL."""

    def gone() -> bool:
        return not (lives(group) or ranks.here())

    if any([send(os.kill, pid, signal.SIGTERM) for pid in ranks.here()]):
        _wait(gone)
    end_group(group, ranks, gone)
    _wait(gone)


def end_group(group: int, ranks: ProcessRegistry, gone: Callable[[], bool]) -> None:
    """SIGTERM to the group; once it is ``gone``, or after ``GRACE_S``, SIGKILL."""
    # NOTE SIGTERM for Ctrl-C too: DeepSpeed's launcher prints a traceback on SIGINT.
    send(os.killpg, group, signal.SIGTERM)
    _wait(gone)
    send(os.killpg, group, signal.SIGKILL)
    for pid in ranks.here():  # started by a remote shell, outside of the group
        send(os.kill, pid, signal.SIGKILL)


def _wait(gone: Callable[[], bool]) -> None:
    deadline = time.monotonic() + GRACE_S
    while not gone() and time.monotonic() < deadline:
        time.sleep(0.05)


def send(kill: Callable[[int, int], None], target: int, signum: int) -> bool:
    """Signal a process (``os.kill``) or group (``os.killpg``); returns whether it existed."""
    try:
        kill(target, signum)
    except ProcessLookupError:
        return False
    return True


def lives(group: int) -> bool:
    """Whether a process of the group runs. Zombies do not count: a container's first process may
    not reap them.
    """
    if not os.path.exists("/proc/self/stat"):
        return send(os.killpg, group, 0)
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, its_group = path.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                return True
    return False


if __name__ == "__main__":
    main()
