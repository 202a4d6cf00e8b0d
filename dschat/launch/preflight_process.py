"""Runs the preflight checks and the memory estimate in a subprocess.

The subprocess loads torch and frees its memory before training starts.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from dschat.config import UserError
from dschat.estimate import PlanRequest

_TIMEOUT_S = 60.0  # for the checks and the estimate


def log_lines(request: PlanRequest) -> list[str]:
    """The memory plan, one line per step. A failed estimate is one line too, not an error.

    Raises:
        UserError: a step names local data or a local checkpoint that it cannot use.
    """
    for name in sorted(request.base_models):
        if not _is_here(name):
            return [f"no plan: the configuration of {name} is not cached, and the hub is offline"]
    command = [sys.executable, "-m", "dschat.launch.preflight"]
    package = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    try:
        done = subprocess.run(
            command,
            input=request.to_json(),
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return [f"no plan: the estimate took more than {_TIMEOUT_S:.0f} s; try --plan"]
    lines = [line for line in done.stdout.splitlines() if line.startswith(("plan:", "no plan:"))]
    if lines and done.returncode == 0:
        return lines
    reason = (done.stderr.strip() or "it exited without a message").splitlines()[-1]
    if done.returncode == 2 and reason.startswith("error: "):
        raise UserError(reason.removeprefix("error: "))
    return [*lines, f"no plan: {reason}"]


def _is_here(name: str) -> bool:
    """Whether a configuration can be loaded: from a folder, the hub, or its cache."""
    if name.startswith("builtin/"):
        return True
    folder = Path(os.path.expanduser(name))
    if os.path.isdir(folder):
        try:
            return "model_type" in json.loads((folder / "config.json").read_text("utf-8"))
        except (ValueError, TypeError, RecursionError):
            return True  # broken: the estimate reports it
        except OSError:
            return False
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() not in ("1", "ON", "YES", "TRUE"):
        return True
    home = os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or Path(home, "hub"))
    return os.path.isdir(hub / f"models--{name.replace('/', '--')}")
