"""Writes files without following a link that someone else left under their names; checksums.

A run's folder may come from elsewhere, and a name that can be foreseen may be a link in it: to the
reader's own files.
"""

import errno
import hashlib
import os
import secrets
import shutil
import stat
from contextlib import suppress
from pathlib import Path

_BLOCK = 1 << 22  # bytes read at a time


def replace_file(path: str | Path, content: str | bytes, modified: float | None = None) -> None:
    """Write ``path``, or replace what is there, so that readers never see part of ``content``.

    It is on disk on return. ``modified``: its time, in seconds since 1970.
    """
    path = Path(path)
    scratch = path.with_name(f".{path.name[:200]}.{secrets.token_hex(8)}")
    data = content.encode() if isinstance(content, str) else content
    try:
        with open(scratch, "xb", opener=no_link) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if modified is not None:
            os.utime(scratch, (modified, modified))
        os.replace(scratch, path)
        sync_file(path.parent)
    except BaseException as error:
        with suppress(OSError):
            scratch.unlink()
        if isinstance(error, OSError):  # the name that the user knows
            error.filename, error.filename2 = str(path), None
        raise


def no_link(path: str, flags: int) -> int:
    """The ``opener`` of files that are written under a known name: OSError for a link, and for a
    pipe or a device, which may block forever.
    """
    handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    raise OSError(errno.EINVAL, "not a file", path)


def discard(path: Path) -> None:
    """Remove a folder, as far as that can be, or the file or link in its place."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def sync_file(path: Path) -> None:
    """Sync a file, or a folder's directory entries, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
