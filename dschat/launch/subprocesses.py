"""Runs the preflight checks and the report in processes of their own.

The preflight process loads torch and frees its memory before training starts. A report is written
while the steps run, and at the end; it never makes a run fail: what goes wrong is one line.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dschat.config import UserError
from dschat.estimate import PlanRequest
from dschat.reporting.run_files import PAGE

_PREFLIGHT_S = 60.0  # for the checks and the estimate
_LONGEST_S = 300.0  # for the last report, which train.py waits for


def preflight_lines(request: PlanRequest) -> list[str]:
    """Check data and models of all steps, and return the memory plan, one line per step. A failed
    estimate is one line too, not an error.

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
            timeout=_PREFLIGHT_S,
        )
    except subprocess.TimeoutExpired:
        return [f"no plan: the estimate took more than {_PREFLIGHT_S:.0f} s; try --plan"]
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
    from huggingface_hub import constants, try_to_load_from_cache

    return not constants.HF_HUB_OFFLINE or bool(try_to_load_from_cache(name, "config.json"))


class RunReport:
    """``every_s``: seconds between reports while steps run; 0: none of those.

    As a context manager, kills a report that is being written on exit.
    """

    def __init__(self, output_dir: Path, environment: Mapping[str, str], every_s: float) -> None:
        self._output_dir = output_dir
        self._environment = environment
        self._every_s = every_s
        self._last = time.monotonic()
        self._process: subprocess.Popen | None = None

    def __enter__(self) -> "RunReport":
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop()

    def is_current(self, marks: Iterable[Path]) -> bool:
        """Whether there is a page not older than any of ``marks``, files of finished steps."""
        try:
            written = (self._output_dir / PAGE).stat().st_mtime
        except OSError:
            return False
        return all(mark.stat().st_mtime <= written for mark in marks)

    def poll(self) -> None:
        """Start a report if one is due and none is being written."""
        if not self._every_s or time.monotonic() - self._last < self._every_s:
            return
        if self._process is not None and self._process.poll() is None:
            return
        self._last = time.monotonic()
        with suppress(OSError):  # no memory for a process: the last report says what is wrong
            self._process = subprocess.Popen(
                self._command(),
                env={**self._environment},
                start_new_session=True,  # Ctrl-C is for the steps
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            # Training goes first. NOTE: a preexec_fn would need this process's memory once more.
            lower = os.getpriority(os.PRIO_PROCESS, 0) + 10
            os.setpriority(os.PRIO_PROCESS, self._process.pid, lower)

    def _stop(self) -> None:
        """Kill a report that is being written; the page before it stays."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def write(self) -> str:
        """Write the report; returns a line that says where, or why not."""
        self._stop()
        try:
            done = subprocess.run(
                self._command(),
                env={**self._environment},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_LONGEST_S,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"no report: {error}"
        if done.returncode == 0:
            return done.stdout.strip()
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return f"no report: {lines[-1].removeprefix('error: ')}"

    def _command(self) -> list[str]:
        return [sys.executable, "-m", "dschat.reporting", "--runs", str(self._output_dir)]
