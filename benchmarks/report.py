"""Describes code, libraries and machine, and summarizes repeated measurements, for the JSON lines
of all benchmarks.
"""

import platform
import statistics
import subprocess
import time
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent


def commit() -> str:
    """Short hash of the checkout, with ``-dirty`` if tracked files are modified; or ``unknown``."""
    try:
        describe = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude=*"],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
    except OSError:
        return "unknown"
    return describe.stdout.strip() or "unknown"


def environment(device: torch.device) -> dict:
    """The commit, versions and machine."""
    return {
        "commit": commit(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "device": device.type,
        "device_name": (
            torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()
        ),
        "threads": torch.get_num_threads(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def machine_rates(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """The machine's current speed: the best of five copies and of five matrix products.

    ``copy_gb_per_s`` counts bytes read and written; ``matmul_tflops`` is for square matrices in
    ``dtype``. They give lower bounds of times, and reveal load on a shared machine.
    """
    on_gpu = device.type == "cuda"
    source = torch.ones((2**31 if on_gpu else 2**27) // dtype.itemsize, dtype=dtype, device=device)
    target = torch.empty_like(source)
    size = 8192 if on_gpu else 1024
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    copy_s = best_s(lambda: target.copy_(source), device)
    matmul_s = best_s(lambda: matrix @ matrix, device)
    return {
        "copy_gb_per_s": rounded(2 * source.numel() * dtype.itemsize / copy_s / 1e9),
        "matmul_tflops": rounded(2 * size**3 / matmul_s / 1e12),
    }


def best_s(action, device: torch.device, repeats: int = 5) -> float:
    """Seconds of the fastest of ``repeats`` calls, after a warm-up; on CUDA by events."""
    from dschat.observability.device_span import DeviceSpan

    action()
    times = []
    for _ in range(repeats):
        span = DeviceSpan(device)
        action()
        times.append(span.stop().seconds())
    return min(times)


def clock(device: torch.device) -> float:
    """The time in seconds, after the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def spread(values: list[float]) -> dict[str, float]:
    """Median, minimum and maximum."""
    return {
        "median": rounded(statistics.median(values)),
        "min": rounded(min(values)),
        "max": rounded(max(values)),
    }


def rounded(value: float) -> float:
    """``value`` with four significant digits; no timing here is more precise."""
    return float(f"{value:.4g}")
