"""How much memory of this host a process may still take.

Nothing comes in; a number of bytes goes out. It must not know who asks, or what for.
"""

from pathlib import Path


def available_memory() -> int:
    """Bytes of host memory that processes may still take, a container's limit included."""
    import psutil

    available = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        lines = (group / "memory.stat").read_text().splitlines()
        cached = dict(line.split() for line in lines)["inactive_file"]  # given up when needed
    except (OSError, ValueError, KeyError):  # no limit, or none that is written there
        return available
    return min(available, max(0, limit - used + int(cached)))
