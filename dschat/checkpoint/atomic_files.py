"""Writes files that survive a power cut, and folders that are complete or absent."""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from dschat.checkpoint.manifest import MANIFEST
from dschat.startup.files import no_link, sha256_of, sync_file

logger = logging.getLogger("dschat")

# Suffixes of hidden folders beside the checkpoints, by the operation that a kill interrupted.
SAVING, REMOVED, REPLACED = ".saving", ".removed", ".replaced"

# safetensors' names of dtypes (https://github.com/huggingface/safetensors, "Format")
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class HashedFile:
    """A new file that counts and hashes what is written to it; synced to disk on exit."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open(path, "wb", opener=no_link)  # noqa: SIM115  closed by __exit__
        self._sha = hashlib.sha256()
        self.size = 0
        self.error: OSError | None = None  # a library that writes here may raise another error

    def write(self, data: Any) -> int:
        try:
            self._file.write(data)
        except OSError as error:
            error.filename = error.filename or str(self._path)
            self.error = error
            raise
        self._sha.update(data)
        self.size += len(data)
        return len(data)

    def flush(self) -> None:
        self._file.flush()

    @property
    def entry(self) -> tuple[int, str]:
        return self.size, self._sha.hexdigest()

    def __enter__(self) -> "HashedFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        try:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self._file.close()


def write_file(path: Path, content: Any) -> tuple[int, str]:
    """Write ``content`` in the format of ``path``'s suffix and sync it; returns size and sha256.

    ``.safetensors``: tensors by name; ``.json``: a JSON value, or bytes; else ``torch.save``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with HashedFile(path) as file:
        try:
            if path.suffix == ".safetensors":
                _write_tensors(file, content)
            elif path.suffix == ".json":
                file.write(content if isinstance(content, bytes) else json.dumps(content).encode())
            else:
                torch.save(content, cast(IO[bytes], file))  # calls only write and flush
        except RuntimeError:  # torch raises it for a failed write
            raise file.error or RuntimeError(f"{path} cannot be written") from file.error
    return file.entry


def _write_tensors(file: HashedFile, tensors: Mapping[str, Tensor]) -> None:
    """The safetensors format, streamed: the library would hold a second copy of all tensors."""
    # Largest elements first, so that each tensor is aligned to its element size.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header, offset = {}, 0
    for name, tensor in ordered:
        end = offset + tensor.nbytes
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for _, tensor in ordered:
        data = tensor.detach().cpu().contiguous().reshape(-1)
        file.write(data.view(torch.uint8).numpy().data)


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
            with open(path, "rb+") as file:
                os.fsync(file.fileno())
            entries[relative] = (path.stat().st_size, sha256_of(path))
    return entries


def move_in(staging: Path, target: Path) -> None:
    """Rename ``staging`` to ``target``, replacing an existing one; synced on return.

    After a kill between the two renames `tidy` restores the old folder.
    """
    old = _aside(target, REPLACED)
    if target.exists():
        os.rename(target, old)
    os.rename(staging, target)
    sync_file(target.parent)
    if old.exists():
        shutil.rmtree(old, ignore_errors=True)


def remove(target: Path) -> None:
    """Remove a checkpoint; after a kill at any moment it is complete or gone."""
    hidden = _aside(target, REMOVED)
    try:
        os.rename(target, hidden)
    except OSError as error:  # keeping one too many loses nothing
        logger.warning("%s cannot be removed: %s", target, error.strerror)
        return
    shutil.rmtree(hidden, ignore_errors=True)


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


def discard(folder: Path) -> None:
    """Remove a folder of an interrupted operation, or the link in its place."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)
