"""Which processes of a step can be asked to stop: a file each, in ``OUT/<step>/.ranks``.

``train.py`` opens the register before it starts a step and takes it away after; a process enrols
while it is in a loop that answers requests. Launchers keep no signals and no exit codes, a folder
that all see does. A lock in it, one for each machine's ``train.py``, says that the step still runs.
Standard library alone; it must not know what is asked of the processes.
"""

import errno
import fcntl
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple, Optional

FOLDER = ".ranks"
_STOPPED = "stopped"  # the mark of a step that stopped because it was asked to
_LOCK = "train"  # and the machine's number


class Holder(NamedTuple):
    """A ``train.py`` whose step still runs. ``lives``: as far as this machine knows."""

    name: str
    lives: bool


@contextmanager
def opened(output_dir: str | Path, machine: int = 0) -> Iterator["ProcessRegistry"]:
    """A register for the processes of the step that writes into ``output_dir``, locked; no trace of
    it is left, nor of folders made for it.

    Raises:
        BlockingIOError: another ``train.py`` has locked it.
    """
    folder = Path(output_dir) / FOLDER
    made = [path for path in (folder, *folder.parents) if not os.path.exists(path)]
    with _locked(folder, machine) as lock:
        register = ProcessRegistry(folder, lock)
        register.remove_stale()
        try:
            yield register
        finally:
            register.remove()
            for path in made:
                with suppress(OSError):  # not empty, or gone
                    path.rmdir()


def _locked(folder: Path, machine: int) -> IO[str]:
    """The lock's file. NOTE it stays locked until the last process that inherited it has closed it
    (``flock``, not ``lockf``): train.py, and the watchdog after it.
    """
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # who held it took the folder away just now
            file = (folder / f"{_LOCK}{machine}").open("a")
            if _try_lock(file) and os.fstat(file.fileno()).st_nlink == 0:
                continue
            file.truncate(0)
            file.write(f"{socket.gethostname()}@{os.getpid()} {_began(os.getpid())}")
            file.flush()
            return file


def _try_lock(file: IO[str]) -> bool:
    """False on a disk without locks; BlockingIOError where somebody else has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise BlockingIOError(error.errno, "the register is locked") from None
        return False
    return True


class ProcessRegistry:
    """The files of one step; names are HOST@PID, contents when the process began."""

    def __init__(self, folder: Path, lock: Optional[IO[str]] = None) -> None:
        self.folder = folder
        self.descriptors = [lock.fileno()] if lock else []  # that a watchdog inherits

    def holder(self, machine: int = 0) -> Optional[Holder]:
        """The ``train.py`` of that machine whose step still runs; None: there is no such."""
        # Where there is no register, or none that can be read, nobody is known to hold it.
        with suppress(OSError), (self.folder / f"{_LOCK}{machine}").open("r+") as file:
            try:
                _try_lock(file)
            except BlockingIOError:
                name, _, began = file.read().partition(" ")
                host, _, pid = name.rpartition("@")
                here = host == socket.gethostname() and pid.isdigit()
                return Holder(name, not here or (bool(began) and began == _began(int(pid))))
        return None

    def remove(self) -> None:
        """Take it away: the step has ended."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def here(self) -> list[int]:
        """Process ids on this machine, of those that live."""
        entries = [path.name.rpartition("@") for path in self._entries()]
        pids = [int(pid) for host, _, pid in entries if host == socket.gethostname()]
        return [pid for pid in pids if self._lives(pid)]

    def elsewhere(self) -> bool:
        """Whether there are processes on other machines."""
        return any(path.name.rpartition("@")[0] != socket.gethostname() for path in self._entries())

    @property
    def stopped(self) -> bool:
        """Whether the step stopped because it was asked to."""
        return (self.folder / _STOPPED).exists()

    def remove_stale(self) -> None:
        """Forget this machine's processes that ended without a word, and how that step ended."""
        (self.folder / _STOPPED).unlink(missing_ok=True)
        living = self.here()
        for path in self._entries():
            host, _, pid = path.name.rpartition("@")
            if host == socket.gethostname() and int(pid) not in living:
                path.unlink(missing_ok=True)

    def _entries(self) -> list[Path]:
        return [path for path in self.folder.glob("*@*") if path.suffix != ".new"]

    def _lives(self, pid: int) -> bool:
        """Whether it is still the process that registered: numbers are given out again."""
        try:
            began = (self.folder / f"{socket.gethostname()}@{pid}").read_text()
        except OSError:
            return False
        return _alive(pid) and began == _began(pid)


@contextmanager
def registered(output_dir: str | Path) -> Iterator[None]:
    """This process can be asked to stop, as long as the block runs; without a register nobody is
    told.
    """
    folder = Path(output_dir) / FOLDER
    path = folder / f"{socket.gethostname()}@{os.getpid()}"
    with suppress(OSError):  # no register, or it cannot be written: then a launcher's rules hold
        fresh = path.with_name(f"{path.name}.new")
        fresh.write_text(_began(os.getpid()))
        fresh.rename(path)
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def mark_stopped(output_dir: str | Path) -> None:
    """Note in the register, if there is one, that the step stops because it was asked to."""
    with suppress(OSError):
        (Path(output_dir) / FOLDER / _STOPPED).write_text("")


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _began(pid: int) -> str:
    """When the process began, in the system's own units; empty where the system does not say, or
    the process has ended.
    """
    try:
        state, *numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state == "Z" else numbers[18]
