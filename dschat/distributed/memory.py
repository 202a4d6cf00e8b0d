"""Free and peak memory of this process's devices and host, container limits included."""

import resource
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from dschat.startup.performance import return_freed_memory

if TYPE_CHECKING:
    import torch

CGROUP = Path("/sys/fs/cgroup")
earlier_peaks: dict[str, int] = {}  # of this process before `restart_peak`, by device type


def available_memory() -> int:
    """Bytes of host memory that processes may still take, a container's limit included."""
    import psutil

    available = psutil.virtual_memory().available
    try:
        limit = int((CGROUP / "memory.max").read_text())
        used = int((CGROUP / "memory.current").read_text())
        lines = (CGROUP / "memory.stat").read_text().splitlines()
        cached = dict(line.split() for line in lines)["inactive_file"]  # given up when needed
    except (OSError, ValueError, KeyError):  # no limit, or none that is written there
        return available
    return min(available, max(0, limit - used + int(cached)))


def free_bytes(device: "torch.device") -> int:
    """Bytes that tensors can still take on ``device``: a CUDA device, or else the host.

    On CUDA that includes what torch's allocator has reserved and no tensor uses, except in the
    pools of captured graphs.
    """
    if device.type != "cuda":
        return_freed_memory()
        return available_memory()
    import torch

    number = torch.cuda.current_device() if device.index is None else device.index
    unused = sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == number and segment["segment_pool_id"] == (0, 0)
    )
    return torch.cuda.mem_get_info(device)[0] + unused


def restart_peak(device: "torch.device") -> int:
    """Restart `peak_bytes` at the bytes that this process holds now, which are returned.

    First what no tensor uses is returned to the device or the system.
    """
    earlier_peaks[device.type] = _highest_bytes(device)
    if device.type == "cuda":
        import torch

        torch.cuda.empty_cache()  # else a peak within it would not be seen
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_reserved(device)
    import psutil

    return_freed_memory()
    with suppress(OSError):  # not Linux, or not permitted: the peak stays the process's
        Path("/proc/self/clear_refs").write_text("5")
    return psutil.Process().memory_info().rss


def peak_bytes(device: "torch.device") -> int:
    """Most bytes held since `restart_peak`: by torch's allocator on CUDA, else resident."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_reserved(device)
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, else KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def peak_memory_gib(device: "torch.device") -> float:
    """Most memory held so far, in GiB (2^30 bytes).

    CUDA: tensors on this device. Otherwise: this process's resident set since it began, children
    and other ranks not included.
    """
    return _highest_bytes(device) / 2**30


def _highest_bytes(device: "torch.device") -> int:
    if device.type == "cuda":
        import torch

        peak = torch.cuda.max_memory_allocated(device)
    else:
        peak = peak_bytes(device)
    return max(peak, earlier_peaks.get(device.type, 0))
