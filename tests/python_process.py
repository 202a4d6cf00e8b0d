"""Runs Python in a process of its own: this checkout, offline, no launcher, no GPU."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# An earlier test may have joined a process group, which sets these.
LAUNCHER = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE")


def environment(**variables: str) -> dict[str, str]:
    """This process's, and ``variables``."""
    inherited = {k: v for k, v in os.environ.items() if k not in LAUNCHER}
    fixed = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    return inherited | fixed | variables


def python(*argv: object, cwd: Path | None = ROOT, **options: Any) -> subprocess.CompletedProcess:
    """``python ARGV``, with what it printed as text; ``cwd``: None: where this process is."""
    command = [sys.executable, *map(str, argv)]
    options = {"env": environment(), "timeout": 600} | options
    return subprocess.run(command, cwd=cwd, capture_output=True, encoding="utf-8", **options)
