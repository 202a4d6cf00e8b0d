"""Writes a run's report in a process of its own: while the steps run, and at the end.

A report never makes a run fail: what goes wrong is one line at the end.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from dschat.config.report import PAGE

_LIBC = ctypes.CDLL(None)  # NOTE: a child must not load it between fork and exec
_SET_DEATH_SIGNAL = 1  # prctl(2): PR_SET_PDEATHSIG
_LONGEST_S = 300.0  # for the last report, which train.py waits for


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
        nothing: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        try:
            self._process = subprocess.Popen(
                self._command(),
                env={**self._environment},
                preexec_fn=partial(_start_in_background, os.getpid()),
                start_new_session=True,  # Ctrl-C is for the steps
                **nothing,
            )
        except OSError:  # no memory for a process: the last report says what is wrong
            self._process = None

    def _stop(self) -> None:
        """Kill a report that is being written; the page before it stays."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def write(self) -> str:
        """Write the report; returns a line that says where, or why not."""
        self._stop()
        try:
            done = subprocess.run(
                self._command(),
                env={**self._environment},
                preexec_fn=partial(_end_with, os.getpid()),
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


def _end_with(parent: int) -> None:
    """In the child: the kernel kills it when train.py ends, however that happens (Linux)."""
    with suppress(AttributeError):
        _LIBC.prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before that
        os._exit(1)


def _start_in_background(parent: int) -> None:
    _end_with(parent)
    os.nice(10)  # training goes first
