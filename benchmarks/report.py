"""Runs the sides of a benchmark in turn and summarizes what they measured; describes code,
libraries and machine for its JSON lines.
"""

import argparse
import os
import platform
import shlex
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch

import dschat.distributed as dist

K = TypeVar("K")
ROOT = Path(__file__).resolve().parent.parent
_DRIVER = ("--query-gpu=driver_version", "--format=csv,noheader", "--id=0")


def flags(docstring: str, rounds: int = 0) -> argparse.ArgumentParser:
    """A parser that prints ``docstring``; with ``rounds``, the default, it has --rounds."""
    parser = argparse.ArgumentParser(
        description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if rounds:
        times = "measurements of each side"
        parser.add_argument("--rounds", type=positive, default=rounds, help=times)
    return parser


def positive(text: str) -> int:
    """A flag's value: 1 or more."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return int(text)


def note(text: str) -> None:
    """Progress, beside the lines of results."""
    print(text, file=sys.stderr, flush=True)


def commit() -> str | None:
    """Short hash of the checkout, with ``-dirty`` if tracked files are modified."""
    return _output("git", "describe", "--always", "--dirty", "--exclude=*")


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    except OSError:
        return None
    return done.stdout.strip() or None


def environment(device: torch.device) -> dict[str, Any]:
    """Commit, command, versions and machine."""
    on_gpu = device.type == "cuda"
    versions = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for name in ("torch", "triton", "transformers", "accelerate", "peft", "deepspeed", "vllm"):
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "commit": commit(),
        "command": shlex.join(["python", *sys.argv]),
        "versions": versions,
        "device": torch.cuda.get_device_name(device) if on_gpu else _processor(),
        "driver": _output("nvidia-smi", *_DRIVER) if on_gpu else None,
        "threads": torch.get_num_threads(),
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith("DSCHAT_")},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def best_s(action, device: torch.device, repeats: int = 5) -> float:
    """Seconds of the fastest of ``repeats`` calls, after a warm-up; on CUDA by events."""
    from dschat.inference.requests.stats import DeviceSpan

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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def take_turns(
    label: str, sides: Mapping[K, Any], rounds: int, shown: Callable[[Any], str]
) -> dict[K, list[Any]]:
    """What each side's ``run(number)`` returned in the rounds 0, the warm-up, to ``rounds``. Rank 0
    notes what ``shown`` makes of it.
    """
    results: dict[K, list[Any]] = {side: [] for side in sides}
    for number in range(rounds + 1):
        when = f"round {number} of {rounds}" if number else "warm-up"
        for side, runner in sides.items():
            results[side].append(runner.run(number))
            if dist.is_main_process():
                note(f"{label}, {side}, {when}: {shown(results[side][-1])}")
    return results


def figures(measured: Mapping[str, float]) -> str:
    """Names and values."""
    return ", ".join(f"{name} {value:.4g}" for name, value in measured.items())


def spread(values: list[float]) -> dict[str, float]:
    """Median, minimum and maximum."""
    return {
        "median": rounded(statistics.median(values)),
        "min": rounded(min(values)),
        "max": rounded(max(values)),
    }


def ratios(numerators: Iterable[float], denominators: Iterable[float]) -> dict[str, float]:
    """The spread of the ratios within each round."""
    return spread([a / b for a, b in zip(numerators, denominators, strict=True)])


def rounded(value: float) -> float:
    """``value`` with four significant digits; no timing here is more precise."""
    return float(f"{value:.4g}")
