"""Watchdog: ends a step's processes when the train.py that started them was killed.

    python -m dschat.launch.watchdog OUT/<step>/.ranks

A process of its own beside each step. It waits at a pipe that train.py holds open: the kernel
closes it however train.py ends, and SIGKILL leaves train.py no other way to tell. Launchers go too,
with the process group that they share with the step. Until the last process is gone it shares the
lock of the register, which the same command, started at once, waits for.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dschat.distributed.process_registry import ProcessRegistry

GRACE_S = 20.0  # what processes get to save and leave, and again between SIGTERM and SIGKILL
LONGEST_S = 2 * GRACE_S + 10.0


@contextmanager
def watched(ranks: ProcessRegistry, environment: Mapping[str, str]) -> Iterator[Callable[[], None]]:
    """A watchdog, as long as the block runs; yields what the step's process is to call first, in
    its own process group: after that no instant is left in which nobody would end it.
    """
    reader, writer = os.pipe()  # NOTE neither end is inherited: the step would hold it open
    dog = subprocess.Popen(
        [sys.executable, "-m", "dschat.launch.watchdog", str(ranks.folder)],
        env=environment,
        stdin=reader,
        stdout=subprocess.DEVNULL,
        pass_fds=ranks.descriptors,
        start_new_session=True,
    )
    os.close(reader)
    try:
        yield lambda: os.write(writer, b"%d" % os.getpid()) and None
    finally:
        dog.kill()
        dog.wait()
        os.close(writer)


def main() -> None:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(signum, signal.SIG_IGN)  # train.py's to answer
    ranks = ProcessRegistry(Path(sys.argv[1]))
    group = sys.stdin.read()  # to the end: train.py is gone
    if group:
        with suppress(OSError):
            sys.stderr.write("train.py was killed; the processes of its step end\n")
        _end(int(group), ranks)
    ranks.remove()


def _end(group: int, ranks: ProcessRegistry) -> None:
    """In peace where processes are registered, else at once."""

    def gone() -> bool:
        return not (lives(group) or ranks.here())

    if any([send(os.kill, pid, signal.SIGTERM) for pid in ranks.here()]):
        _wait(gone)
    send(os.killpg, group, signal.SIGTERM)
    _wait(gone)
    send(os.killpg, group, signal.SIGKILL)
    for pid in ranks.here():  # those that a remote shell started are in no group of ours
        send(os.kill, pid, signal.SIGKILL)
    _wait(gone)


def _wait(gone: Callable[[], bool]) -> None:
    deadline = time.monotonic() + GRACE_S
    while not gone() and time.monotonic() < deadline:
        time.sleep(0.05)


def send(kill: Any, target: int, signum: int) -> bool:
    """Whether the process, or process group, was there to get the signal."""
    try:
        kill(target, signum)
    except ProcessLookupError:
        return False
    return True


def lives(group: int) -> bool:
    """Whether a process of the group runs. Its dead may stay in the table: a container's first
    process need not reap them.
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
