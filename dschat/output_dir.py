"""The folder a step writes into: checked before anything loads, claimed once training begins.

A path comes in; a folder to write into, and at the end the mark of a finished step, go out. Between
the check and the claim nothing is left on disk, so that a mistake found meanwhile (a damaged
checkpoint) costs nobody a finished model. It must not know what is written.
"""

import errno
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO

from dschat import dist
from dschat.knobs import UserError

COMPLETE = "COMPLETE"  # the file that marks a finished step
CHECKPOINTS = "checkpoints"  # the folder of what a run can go on from
_LOCK = ".lock"
_claims: dict[str, IO[str]] = {}  # by folder


def check_output_dir(output_dir: str | Path, overwrite: bool) -> None:
    """``UserError`` where the folder holds a finished step or cannot be written; leaves no trace.

    Only the main process tries to write.
    """
    folder = Path(output_dir)
    if os.path.exists(folder / COMPLETE) and not overwrite:
        raise UserError(
            f"--output_dir {folder} holds a finished step; choose another, "
            "or pass --overwrite_output_dir"
        )
    if dist.is_main_process():
        check_writable(folder)


def check_writable(folder: Path) -> None:
    """``UserError`` where no file can be made in ``folder``, which need not exist yet.

    It is tried, not asked: permissions do not tell of full disks, or of what root may not do.
    """
    made: list[Path] = []
    try:
        for path in reversed([folder, *folder.parents]):
            if not os.path.exists(path):
                path.mkdir()
                made.append(path)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = "a file is in its way" if _is_blocked(folder) else error.strerror or str(error)
        raise UserError(
            f"--output_dir {folder} cannot be written: {reason}; choose another folder"
        ) from None
    finally:
        for path in reversed(made):
            path.rmdir()


def _is_blocked(folder: Path) -> bool:
    return any(os.path.lexists(p) and not os.path.isdir(p) for p in (folder, *folder.parents))


def claim_output_dir(output_dir: str | Path, goes_on: bool = False) -> None:
    """Collective. Make the folder, and take the mark of an earlier run away: what is there now is
    no longer what it says. Unless the run ``goes_on``, first its checkpoints: without the mark they
    would be those of an unfinished one.
    """
    if dist.is_main_process():
        folder = Path(output_dir)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--output_dir {folder} cannot be made: {error.strerror}") from error
        _claim(folder)
        if not goes_on:
            shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
        (folder / COMPLETE).unlink(missing_ok=True)
    dist.barrier()


def _claim(folder: Path) -> None:
    """``UserError`` where another process writes into ``folder``: one that lost its train.py while
    it loads or saves a model, say. The claim ends with this process.
    """
    if held := _claims.pop(str(folder), None):
        held.close()
    file = (folder / _LOCK).open("w")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # NOTE of this process, not of its forks
    except OSError as error:
        file.close()
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            return  # a disk without locks
        raise UserError(
            f"--output_dir {folder} is being written by another run; end that, or let it finish"
        ) from None
    _claims[str(folder)] = file


def _release(folder: Path) -> None:
    (folder / _LOCK).unlink(missing_ok=True)
    if file := _claims.pop(str(folder), None):
        file.close()


def mark_complete(output_dir: str | Path) -> None:
    """Collective. Leave the mark by which ``train.py`` knows that this step is done."""
    dist.barrier()
    if dist.is_main_process():
        (Path(output_dir) / COMPLETE).write_text("")
        _release(Path(output_dir))
    dist.barrier()
