"""Registers a step's processes that can be asked to stop: a file each in ``OUT/<step>/.ranks``.

``train.py`` creates the folder before a step and removes it afterwards; a process is registered
while it is in a loop that can save. Files on the shared disk, because launchers do not pass on all
signals and exit codes. A lock in the folder, one per machine's ``train.py``, marks a running step.
"""

import errno
import fcntl
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple, Optional

from dschat.startup.files import discard, no_link, replace_file

FOLDER = ".ranks"
_STOPPED = "stopped"  # the mark of a step that stopped on request
_LOCK = "train"  # and the machine's number


class Holder(NamedTuple):
    """A ``train.py`` whose step still runs. ``lives``: also True on another machine."""

    name: str
    lives: bool


@contextmanager
def opened(output_dir: str | Path, machine: int = 0) -> Iterator["ProcessRegistry"]:
    """The locked registry of the step that writes into ``output_dir``.

    On exit it is removed, and the folders that were made for it.

    Raises:
        BlockingIOError: another ``train.py`` has locked it.
    """
    folder = Path(output_dir) / FOLDER
    made = [path for path in (folder, *folder.parents) if not os.path.exists(path)]
    with _locked(folder, machine) as lock:
        registry = ProcessRegistry(folder, lock)
        registry.remove_stale()
        try:
            yield registry
        finally:
            registry.remove()
            for path in made:
                with suppress(OSError):  # not empty, or gone
                    path.rmdir()


def _locked(folder: Path, machine: int) -> IO[str]:
    """The locked file.

    NOTE: it stays locked until the last process that inherited it closes it (``flock``, not
    ``lockf``): train.py, and its watchdog.
    """
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # its previous holder has just removed the folder
            file = open(folder / f"{_LOCK}{machine}", "a", opener=no_link)  # noqa: SIM115
            if try_lock(file) and os.fstat(file.fileno()).st_nlink == 0:
                continue
            file.truncate(0)
            file.write(f"{socket.gethostname()}@{os.getpid()} {_start_time(os.getpid())}")
            file.flush()
            return file


def try_lock(file: IO[str], lock: Callable[[IO[str], int], None] = fcntl.flock) -> bool:
    """False on a disk without locks; BlockingIOError where another process holds it."""
    try:
        lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise BlockingIOError(error.errno, f"{file.name} is locked") from None
        return False
    return True


class ProcessRegistry:
    """The files of one step: named HOST@PID, holding the start time of the process."""

    def __init__(self, folder: Path, lock: Optional[IO[str]] = None) -> None:
        self.folder = folder
        self.descriptors = [lock.fileno()] if lock else []  # that a watchdog inherits

    def holder(self, machine: int = 0) -> Optional[Holder]:
        """The running ``train.py`` of that machine; None: none, or unknown."""
        path = self.folder / f"{_LOCK}{machine}"
        with suppress(OSError), open(path, "r+", errors="replace", opener=no_link) as file:
            try:
                try_lock(file)
            except BlockingIOError:
                name, _, start = file.read().partition(" ")
                host, _, pid = name.rpartition("@")
                here = host == socket.gethostname() and pid.isdigit()
                return Holder(name, not here or _lives(int(pid), start))
        return None

    def remove(self) -> None:
        """Remove the folder, after the step."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def here(self) -> list[int]:
        """Ids of the registered processes of this machine that live."""
        return [pid for path, pid in self._entries() if pid and _lives(pid, _content(path))]

    def elsewhere(self) -> bool:
        """Whether processes of other machines are registered."""
        return any(pid is None for _, pid in self._entries())

    @property
    def stopped(self) -> bool:
        return (self.folder / _STOPPED).exists()

    def remove_stale(self) -> None:
        """Remove the entries of this machine's processes that were killed, and the stopped mark."""
        discard(self.folder / _STOPPED)
        for path, pid in self._entries():
            if pid and not _lives(pid, _content(path)):
                discard(path)

    def _entries(self) -> Iterator[tuple[Path, Optional[int]]]:
        """The file of each process, and its id if it is of this machine."""
        for path in self.folder.glob("[!.]*@*"):
            host, _, pid = path.name.rpartition("@")
            if pid.isdecimal():
                yield path, int(pid) if host == socket.gethostname() else None


@contextmanager
def registered(output_dir: str | Path) -> Iterator[None]:
    """A scope in which this process is registered; does nothing without a registry."""
    folder = Path(output_dir) / FOLDER
    path = folder / f"{socket.gethostname()}@{os.getpid()}"
    with suppress(OSError):  # no registry, or it cannot be written
        replace_file(path, _start_time(os.getpid()))
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def mark_stopped(output_dir: str | Path) -> None:
    """Mark in the registry, if there is one, that the step stops on request."""
    with suppress(OSError):
        replace_file(Path(output_dir) / FOLDER / _STOPPED, "")


def _content(path: Path) -> str:
    """Empty where the file is gone, or is none."""
    try:
        with open(path, errors="replace", opener=no_link) as file:
            return file.read()
    except OSError:
        return ""


def _lives(pid: int, start: str) -> bool:
    """Whether it is still the process that started then: process ids are reused."""
    return bool(start) and start == _start_time(pid)


def _start_time(pid: int) -> str:
    """Start time of the process in clock ticks since boot; empty where it has ended."""
    state, *numbers = _content(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split() or ["Z"]
    return "" if state == "Z" else numbers[18]
