"""Which processes of a step can be asked to stop: a file each, in ``OUT/<step>/.ranks``.

``train.py`` opens the register before it starts a step and takes it away after; a process enrols
while it is in a loop that answers requests. Launchers keep no signals and no exit codes, a folder
that all see does. Standard library alone; it must not know what is asked of the processes.
"""

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FOLDER = ".ranks"
_STOPPED = "stopped"  # the mark of a step that stopped because it was asked to


@contextmanager
def opened(output_dir: str | Path) -> Iterator["Register"]:
    """A register for the processes of the step that writes into ``output_dir``; no trace of it is
    left, nor of folders made for it.
    """
    folder = Path(output_dir) / FOLDER
    made = [path for path in (folder, *folder.parents) if not os.path.exists(path)]
    folder.mkdir(parents=True, exist_ok=True)
    register = Register(folder)
    register.strike_dead()
    try:
        yield register
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for path in made:
            with suppress(OSError):  # not empty, or gone
                path.rmdir()


class Register:
    """The files of one step; names are HOST@PID, contents when the process began."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

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
        return (self._folder / _STOPPED).exists()

    def strike_dead(self) -> None:
        """Forget this machine's processes that ended without a word, and how that step ended."""
        (self._folder / _STOPPED).unlink(missing_ok=True)
        living = self.here()
        for path in self._entries():
            host, _, pid = path.name.rpartition("@")
            if host == socket.gethostname() and int(pid) not in living:
                path.unlink(missing_ok=True)

    def _entries(self) -> list[Path]:
        return [path for path in self._folder.glob("*@*") if path.suffix != ".new"]

    def _lives(self, pid: int) -> bool:
        """Whether it is still the process that enrolled: numbers are given out again."""
        try:
            began = (self._folder / f"{socket.gethostname()}@{pid}").read_text()
        except OSError:
            return False
        return _alive(pid) and began == _began(pid)


@contextmanager
def enrolled(output_dir: str | Path) -> Iterator[None]:
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
