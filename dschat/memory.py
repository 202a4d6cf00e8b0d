"""Free and peak memory of this process's devices and host, container limits included."""

import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_CGROUP = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Bytes of host memory that processes may still take, a container's limit included."""
    import psutil

    available = psutil.virtual_memory().available
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
        cached = dict(line.split() for line in lines)["inactive_file"]  # given up when needed
    except (OSError, ValueError, KeyError):  # no limit, or none that is written there
        return available
    return min(available, max(0, limit - used + int(cached)))


def free_bytes(device: "torch.device") -> int:
    """Bytes that can still be allocated on ``device``: a CUDA device, or else the host."""
    if device.type != "cuda":
        return available_memory()
    import torch

    return torch.cuda.mem_get_info(device)[0]


def peak_memory_gib(device: "str | torch.device") -> float:
    """Most memory held so far, in GiB (2^30 bytes).

    CUDA: tensors on this device, since its peak statistics were last reset. Otherwise: this
    process's resident set since it began, children and other ranks not included.
    """
    import torch

    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
