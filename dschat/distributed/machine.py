"""This machine's processor, and the user's cache folder for what is built or measured on it."""

import errno
import os
import platform
import re
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path


def processor() -> str:
    """Processor model and instruction sets, as far as the system reports them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    fields = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    first = {line.split(":")[0].strip(): line for line in reversed(lines)}
    return "\n".join([platform.machine(), *(first.get(name, "") for name in fields)])


def user_cache() -> Path:
    """``${XDG_CACHE_HOME:-~/.cache}/dschat``, which may be missing or not writable."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "dschat"


def writable_cache() -> Path:
    """`user_cache`, or a temporary folder of this user if that is not writable."""
    cache = user_cache()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            return cache
    except OSError:
        shared = Path(tempfile.gettempdir()) / f"dschat-{os.getuid()}"
        with suppress(OSError):
            shared.mkdir(mode=0o700)
        is_mine = not shared.exists() or shared.stat().st_uid == os.getuid()
        if shared.is_symlink() or not is_mine:
            return Path(tempfile.mkdtemp(prefix="dschat-"))
        return shared


# -- disk space ------------------------------------------------------------------------------------

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
