"""Output folder of a step: checked before anything loads, claimed when training begins.

Until it is claimed nothing in it changes, so that a mistake found meanwhile (a damaged checkpoint)
does not cost a finished model.
"""

import fcntl
import glob
import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import dschat.distributed as dist
from dschat.checkpoint import manifest
from dschat.checkpoint.compatibility import contents_of
from dschat.config import CommonConfig, UserError
from dschat.config.errors import require
from dschat.distributed.machine import free_bytes, needed_and_free
from dschat.distributed.process_registry import try_lock
from dschat.observability.metrics_log import METRICS, SAMPLES, SETTINGS, WARNINGS
from dschat.startup.files import discard, no_link, replace_file

COMPLETE = manifest.COMPLETE
_LOCK = ".lock"
PRODUCTS = ("actor", "actor_best", "actor_ema", "adapter", "critic", "reward_best")  # subfolders
_DATA = ("data_path", "eval_data_path", "unsupervised_dataset_name")
_WEIGHT = re.compile(r":[0-9.]+(e[+-]?\d+)?$")  # PATH:WEIGHT
# The locks that this process holds, and the contents of the future marks; by folder.
_claims: dict[str, tuple[IO[str], str]] = {}


def check_output_dir(
    output_dir: str | Path, overwrite: bool, fields: Mapping[str, Any] | None = None
) -> None:
    """``UserError`` where the folder holds a finished step, cannot be written, or is an input of
    the step (named by its ``fields``); changes nothing on disk.

    Only rank 0 tries to write.
    """
    folder = Path(output_dir)
    check_apart(folder, fields or {})
    if os.path.exists(folder / COMPLETE) and not overwrite:
        raise UserError(
            f"--output_dir {folder} holds a finished step; choose another, "
            "or pass --overwrite_output_dir"
        )
    for name in (METRICS, SAMPLES, WARNINGS, SETTINGS, *PRODUCTS):  # found before training
        path = folder / name
        fits = path.is_dir() if name in PRODUCTS else path.is_file() and not path.is_symlink()
        require(
            fits or not os.path.lexists(path),
            f"--output_dir {folder}: its {name} is not a {'folder' if name in PRODUCTS else 'file'}"
            "; remove it, or choose another folder",
        )
    if dist.is_main_process():
        check_writable(folder)


def check_apart(output_dir: str | Path, fields: Mapping[str, Any]) -> None:
    """``UserError`` where the folder is, or is inside, the folder of a model or data set in
    ``fields``; or where an input model is one that the step would overwrite.
    """
    output = Path(os.path.realpath(output_dir))
    written = {output / name for name in PRODUCTS}
    for key, given in fields.items():
        is_model = key.endswith("name_or_path")
        if not given or not (is_model or key in _DATA):
            continue
        for name in [given] if isinstance(given, str) else given:
            read = {Path(os.path.realpath(folder)) for folder in _folders(name)}
            if read & {output, *output.parents} or (is_model and read & written):
                raise UserError(
                    f"--output_dir {output_dir} would be written among the files of --{key} "
                    f"{name}; choose another folder"
                )


def _folders(name: str) -> list[str]:
    """The local folder ``name``, or the folders of the files that match it as a pattern."""
    path = os.path.expanduser(_WEIGHT.sub("", name))
    if os.path.isdir(path):
        return [path]
    files = glob.glob(path, recursive=True) if glob.has_magic(path) else []
    return [os.path.dirname(file) for file in files]


def check_writable(folder: Path) -> None:
    """``UserError`` where no file can be created in ``folder``, which need not exist yet.

    Creates a temporary file: permissions do not show full disks, or limits that apply to root.
    """
    made: list[Path] = []
    try:
        for path in reversed([folder, *folder.parents]):
            if not os.path.exists(path):
                with suppress(FileExistsError):  # another machine has made it
                    path.mkdir()
                    made.append(path)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(
            f"--output_dir {folder} cannot be written: {reason}; choose another folder"
        ) from None
    finally:
        for path in reversed(made):
            with suppress(OSError):  # another machine already writes there
                path.rmdir()


def check_room(folder: str | Path, sizes: Sequence[int]) -> None:
    """``UserError`` where models of ``sizes`` bytes cannot all be written into ``folder``.

    They replace the files in it, but only one by one: the largest needs free space.
    """
    if not dist.is_main_process():
        return
    replaced = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    needed = max(*sizes, sum(sizes) - replaced)
    if needed > free_bytes(folder):
        raise UserError(
            f"--output_dir {folder} has no space for the model: {needed_and_free(needed, folder)}; "
            "free some, or choose another folder"
        )


def claim_output_dir(output_dir: str | Path, resumes: bool = False, record: str = "") -> None:
    """Collective. Make the folder and remove the mark of an earlier finished run.

    Unless the run ``resumes``, removes the earlier checkpoints first: without the mark they would
    look like an unfinished run's. The models of a finished run go after its mark: the new run may
    not write all of them. ``record``: contents of the new mark, by `record_of`.
    """
    if dist.is_main_process():
        folder = Path(output_dir)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--output_dir {folder} cannot be made: {error.strerror}") from None
        _claim(folder, record)
        if not resumes:
            _remove_checkpoints(folder / manifest.FOLDER)
        if os.path.lexists(folder / COMPLETE):
            discard(folder / COMPLETE)
            for name in PRODUCTS:
                discard(folder / name)
    dist.barrier()


def _remove_checkpoints(folder: Path) -> None:
    """Where ``folder`` is a link, it stays, as users link to a larger disk."""
    for path in manifest.step_folders(folder):
        discard(path)
    if left := list(manifest.step_folders(folder)):
        raise UserError(f"{left[0]} cannot be removed; remove it by hand, or choose another folder")
    if not folder.is_symlink():
        discard(folder)


def _claim(folder: Path, record: str) -> None:
    """Lock ``folder`` until this process ends; ``UserError`` where another one has the lock.

    That may be a step that lost its train.py while it loads or saves a model.
    """
    if held := _claims.pop(str(folder), None):
        held[0].close()
    try:
        file = open(folder / _LOCK, "w", opener=no_link)  # noqa: SIM115  held until `mark_complete`
    except OSError as error:
        raise UserError(f"--output_dir {folder}: {_LOCK}: {error.strerror}; remove it") from None
    try:
        # NOTE: lockf, not flock: held by this process, not by its forks.
        try_lock(file, fcntl.lockf)
    except BlockingIOError:
        file.close()
        raise UserError(
            f"--output_dir {folder} is being written by another run; end that, or let it finish"
        ) from None
    _claims[str(folder)] = file, record


def record_of(config: CommonConfig) -> str:
    """Content of the COMPLETE file of a step that starts now."""
    record = {
        "started": time.time(),  # so a model that is trained again gets another fingerprint
        "num_processes": dist.world_size(),
        "working_directory": os.getcwd(),
        "auto_dtype": "bf16" if dist.device().type == "cuda" else "fp32",
        "contents": contents_of(config),
    }
    return json.dumps(record) + "\n"


def mark_complete(output_dir: str | Path) -> None:
    """Collective. Write the file that marks this step as finished, for ``train.py``."""
    dist.barrier()
    if dist.is_main_process():
        folder = Path(output_dir)
        file, record = _claims.get(str(folder), (None, ""))
        replace_file(folder / COMPLETE, sealed(folder, record))
        (folder / _LOCK).unlink(missing_ok=True)
        if file is not None:
            file.close()
            del _claims[str(folder)]
    dist.barrier()


def sealed(folder: Path, record: str) -> str:
    """``record``, and in a line of its own the checksum of it and of the step's settings."""
    settings = folder / SETTINGS
    content = settings.read_bytes() if settings.is_file() else b""
    return f"{record}{hashlib.sha256(record.encode() + content).hexdigest()}\n"
