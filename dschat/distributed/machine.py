"""This machine's processor, and the user's cache folder for what is built or measured on it."""

import os
import platform
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
