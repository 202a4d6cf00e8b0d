"""Free space of a disk, and whether an error says that it is full."""

import errno
import os
import re
import shutil
import sys
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT)
# Libraries in Rust raise errors of their own: "I/O error: No space left on device (os error 28)".
_FULL_TEXT = re.compile(rf"\(os error ({'|'.join(map(str, _FULL))})\)")


def is_full(error: BaseException) -> bool:
    """Whether ``error`` says that a disk is full, or the user's quota on it."""
    if isinstance(error, OSError) and error.errno in _FULL:
        return True
    return bool(_FULL_TEXT.search(str(error)))


def free_bytes(folder: str | os.PathLike) -> int:
    """Bytes that this user can still write into ``folder``, which need not exist yet."""
    path = Path(os.path.abspath(folder))
    usage = shutil.disk_usage(next(p for p in (path, *path.parents) if os.path.exists(p)))
    return usage.free if usage.total else sys.maxsize  # some network disks report zeros


def needed_and_free(needed: int, folder: str | os.PathLike) -> str:
    """``5.0 MiB needed, 1.0 MiB free``; what was written before an error is free again."""
    free = free_bytes(folder)
    return f"{_shown(needed)} needed" + (f", {_shown(free)} free" if free < needed else "")


def _shown(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
