"""Writes files that survive a power cut, and folders that are complete or absent."""

import errno
import json
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from dschat.checkpoint.manifest import MANIFEST
from dschat.config.errors import first_line
from dschat.startup.files import discard, no_link, sha256_of, sync_file

logger = logging.getLogger("dschat")

# Suffixes of hidden folders beside the checkpoints, by the operation that a kill interrupted.
SAVING, REMOVED, REPLACED = ".saving", ".removed", ".replaced"


def write_file(path: Path, content: Any) -> tuple[int, str]:
    """Write ``content`` in the format of ``path``'s suffix and sync it; returns size and sha256.

    ``.safetensors``: tensors by name; ``.json``: a JSON value, or bytes; else ``torch.save``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        if path.suffix == ".safetensors":
            save_tensors({name: tensor.contiguous() for name, tensor in content.items()}, path)
        elif path.suffix == ".json":
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            with open(path, "wb", opener=no_link) as file:
                file.write(data)
        else:
            with open(path, "wb", opener=no_link) as file:
                torch.save(content, file)
    except SafetensorError as error:
        raise OSError(errno.EIO, first_line(error), str(path)) from None
    except (OSError, RuntimeError) as error:
        failed = error.__context__ if isinstance(error, RuntimeError) else error  # torch hides it
        if isinstance(failed, OSError):
            raise OSError(failed.errno, failed.strerror, str(path)) from None
        raise
    sync_file(path)
    return path.stat().st_size, sha256_of(path)


def save_tensors(tensors: dict[str, Tensor], path: Path, **header: str) -> None:
    """Write a safetensors file, which unlike the library's may be read by whom the umask lets."""
    os.close(no_link(str(path), os.O_WRONLY | os.O_CREAT))
    mode = path.stat().st_mode
    save_file(tensors, path, {"format": "pt", **header})  # replaces it by a file of mode 0600
    path.chmod(mode)


def sync_folders(folder: Path) -> None:
    """Sync the directory entries of ``folder`` and of the folders below it to disk."""
    for path, _, _ in os.walk(folder):
        sync_file(Path(path))


def unclaimed(folder: Path, claimed: Mapping[str, Any]) -> dict[str, tuple[int, str]]:
    """Sync all files in ``folder`` that are not in ``claimed``; returns their sizes and checksums.

    DeepSpeed copies such files itself: optimizer states that are offloaded to a disk. Hidden files
    are skipped.
    """
    entries = {}
    for root, _, names in os.walk(folder):
        for path in (Path(root) / name for name in names if not name.startswith(".")):
            relative = path.relative_to(folder).as_posix()
            if relative in claimed or relative == MANIFEST:
                continue
            sync_file(path)
            entries[relative] = (path.stat().st_size, sha256_of(path))
    return entries


def move_in(staging: Path, target: Path) -> None:
    """Rename ``staging`` to ``target``, replacing an existing one; synced on return.

    After a kill between the two renames `tidy` restores the old folder.
    """
    old = _aside(target, REPLACED)
    if os.path.lexists(target):
        os.rename(target, old)
    os.rename(staging, target)
    sync_file(target.parent)
    if os.path.lexists(old):
        discard(old)


def remove(target: Path) -> None:
    """Remove a checkpoint; after a kill at any moment it is complete or gone."""
    hidden = _aside(target, REMOVED)
    try:
        os.rename(target, hidden)
    except OSError as error:  # keeping one too many loses nothing
        logger.warning("%s cannot be removed: %s", target, error.strerror)
        return
    discard(hidden)


def _aside(target: Path, suffix: str) -> Path:
    return target.with_name(f".{target.name}{suffix}")


def staging_of(target: Path) -> Path:
    """The folder that the files of ``target`` are written into."""
    return _aside(target, SAVING)


def tidy(folder: Path) -> None:
    """Remove what killed processes left in ``folder``; restore a checkpoint being replaced."""
    for suffix in (SAVING, REMOVED, REPLACED):
        for path in folder.glob(f".step_*{suffix}"):
            target = path.with_name(path.name[1:].removesuffix(suffix))
            if suffix == REPLACED and not (path.is_symlink() or target.exists()):
                with suppress(OSError):  # the disk cannot be written
                    os.rename(path, target)
            else:
                discard(path)
