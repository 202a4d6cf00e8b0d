"""The folder a step writes into: checked before anything loads, claimed once training begins.

A path comes in; a folder to write into, and at the end the mark of a finished step, go out. Between
the check and the claim nothing is left on disk, so that a mistake found meanwhile (a damaged
checkpoint) costs nobody a finished model. It must not know what is written.
"""

import errno
import fcntl
import glob
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import dschat.distributed as dist
from dschat.checkpoint import manifest
from dschat.config import UserError
from dschat.disk_space import free_bytes, needed_and_free

COMPLETE = "COMPLETE"  # the file that marks a finished step
_LOCK = ".lock"
_PRODUCTS = ("actor", "actor_best", "actor_ema", "critic")  # folders in it that a step fills
_DATA = ("data_path", "eval_data_path", "unsupervised_dataset_name")
_WEIGHT = re.compile(r":[0-9.]+(e[+-]?\d+)?$")  # PATH:WEIGHT
_claims: dict[str, IO[str]] = {}  # by folder
_records: dict[str, str] = {}  # what its mark will say, by folder


def check_output_dir(
    output_dir: str | Path, overwrite: bool, fields: Mapping[str, Any] | None = None
) -> None:
    """``UserError`` where the folder holds a finished step, cannot be written or is one that the
    step's ``fields`` read; leaves no trace.

    Only the main process tries to write.
    """
    folder = Path(output_dir)
    check_apart(folder, fields or {})
    if os.path.exists(folder / COMPLETE) and not overwrite:
        raise UserError(
            f"--output_dir {folder} holds a finished step; choose another, "
            "or pass --overwrite_output_dir"
        )
    if dist.is_main_process():
        check_writable(folder)


def check_apart(output_dir: str | Path, fields: Mapping[str, Any]) -> None:
    """``UserError`` where the folder is, or lies in, that of a model or of data which ``fields``
    name; or where a model is one of those that the step would write.
    """
    own = Path(os.path.realpath(output_dir))
    written = {own / name for name in _PRODUCTS}
    for key, given in fields.items():
        is_model = key.endswith("name_or_path")
        if not given or not (is_model or key in _DATA):
            continue
        for name in [given] if isinstance(given, str) else given:
            read = {Path(os.path.realpath(folder)) for folder in _folders(name)}
            if read & {own, *own.parents} or (is_model and read & written):
                raise UserError(
                    f"--output_dir {output_dir} would be written among the files of --{key} "
                    f"{name}; choose another folder"
                )


def _folders(name: str) -> list[str]:
    """The local folder that ``name`` stands for; those of the files that match, for a pattern."""
    path = os.path.expanduser(_WEIGHT.sub("", name))
    if os.path.isdir(path):
        return [path]
    found = glob.glob(path, recursive=True) if glob.has_magic(path) else []
    return [os.path.dirname(file) for file in found]


def check_writable(folder: Path) -> None:
    """``UserError`` where no file can be made in ``folder``, which need not exist yet.

    It is tried, not asked: permissions do not tell of full disks, or of what root may not do.
    """
    _check_name(folder)
    made: list[Path] = []
    try:
        for path in reversed([folder, *folder.parents]):
            if not os.path.exists(path):
                with suppress(FileExistsError):  # another machine's process was faster
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
            with suppress(OSError):  # another machine's process writes there already
                path.rmdir()


def _check_name(folder: Path) -> None:
    """What writes tokenizers and TensorBoard's events takes no other names than UTF-8's."""
    try:
        str(folder).encode()
    except UnicodeEncodeError:
        shown, remedy = os.fsencode(folder).decode(errors="backslashreplace"), "choose another name"
        if shown.encode() == os.fsencode(folder):  # it is UTF-8, and Python was told not to read it
            remedy = "unset PYTHONUTF8, or set LC_ALL=C.UTF-8"
        raise UserError(f"--output_dir {shown} is not read as UTF-8 here; {remedy}") from None


def check_room(folder: str | Path, sizes: Sequence[int]) -> None:
    """``UserError`` where models of ``sizes`` bytes cannot all be written into ``folder``.

    What is there already may have to make room for them, but for the one being written.
    """
    if not dist.is_main_process():
        return
    there = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    needed = max(*sizes, sum(sizes) - there)
    if needed > free_bytes(folder):
        raise UserError(
            f"--output_dir {folder} has no space for the model: {needed_and_free(needed, folder)}; "
            "free some, or choose another folder"
        )


def _is_blocked(folder: Path) -> bool:
    return any(os.path.lexists(p) and not os.path.isdir(p) for p in (folder, *folder.parents))


def claim_output_dir(output_dir: str | Path, goes_on: bool = False, record: str = "") -> None:
    """Collective. Make the folder, and take the mark of an earlier run away: what is there now is
    no longer what it says. Unless the run ``goes_on``, first its checkpoints: without the mark they
    would be those of an unfinished one. ``record``: what the new mark is to say.
    """
    if dist.is_main_process():
        folder = Path(output_dir)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--output_dir {folder} cannot be made: {error.strerror}") from error
        _claim(folder)
        if not goes_on:
            shutil.rmtree(folder / manifest.FOLDER, ignore_errors=True)
        (folder / COMPLETE).unlink(missing_ok=True)
        _records[str(folder)] = record
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
        record = _records.pop(str(Path(output_dir)), "")
        (Path(output_dir) / COMPLETE).write_text(record, encoding="utf-8")
        _release(Path(output_dir))
    dist.barrier()
