"""Runs what train.py starts: a step's command, the preflight checks and the report, each in a
process of its own.

A step runs in a process group that forwards signals and leaves no process behind. The first signal
to ``train.py`` is sent once to each registered process (`dschat.distributed.process_registry`),
which saves and exits. Launchers would forward it to one process after another, kill a process that
takes 30 seconds, or drop the signal. If no process is registered yet, and at a second signal, the
whole group is terminated.

The preflight process loads torch and frees its memory before training starts. A report is written
at the end; it never makes a run fail: what goes wrong is one line.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from dschat.config import UserError
from dschat.config.errors import first_line, printable
from dschat.config.fields import read_text
from dschat.distributed import process_registry, stop_signals
from dschat.estimate import PlanRequest
from dschat.launch import watchdog
from dschat.launch.cluster import Cluster
from dschat.launch.watchdog import end_group, send
from dschat.reporting.run_files import PAGE


class ProcessSupervisor(ExitStack):
    """Context manager that catches signals and runs commands meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self._caught: list[int] = []

    def __enter__(self) -> "ProcessSupervisor":
        for signum in stop_signals.SIGNALS:
            handler = signal.getsignal(signum)
            if handler is not signal.SIG_IGN:  # nohup, or a background job
                signal.signal(signum, lambda number, _frame: self._caught.append(number))
                self.callback(signal.signal, signum, handler)
        return self

    @property
    def stop_requested(self) -> bool:
        """Whether a signal has arrived; no further command should start."""
        return bool(self._caught)

    def run(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        output_dir: Path,
        cluster: Cluster,
    ) -> int:
        """Run ``command`` in its own process group, wait for it, and return its exit code.

        75: stopped by a signal and saved. While models load there is nothing to save: 130 for
        Ctrl-C, 143 for SIGTERM, 75 for SIGUSR1. No process of the group is left in any case.
        """
        with ExitStack() as block:
            try:
                ranks = block.enter_context(
                    process_registry.opened(output_dir, cluster.number_here)
                )
            except BlockingIOError:
                raise _held(output_dir, "another train.py") from None
            except OSError as error:
                raise UserError(
                    f"{error.filename or output_dir}: {error.strerror}; remove it, or choose "
                    "another --output_dir"
                ) from None
            announce = block.enter_context(watchdog.watched(ranks, environment))
            process = subprocess.Popen(
                command,
                env={**environment, stop_signals.LAUNCHED_BY: str(os.getpid())},
                start_new_session=True,
                preexec_fn=announce,
            )
            while process.poll() is None and not self.stop_requested:
                time.sleep(0.05)
            signaled = process.poll() is None and _request_stop(ranks, process.pid, cluster.relay)
            if signaled:
                say("stopping after this step; a second signal ends it at once")
            # The launcher may have died of the same signal while its processes still save.
            while signaled and len(self._caught) < 2 and (process.poll() is None or ranks.here()):
                time.sleep(0.05)
            end_group(process.pid, ranks, lambda: len(self._caught) > 1 or _is_gone(process))
            process.wait()
            caught = tuple(self._caught)
            code = exit_code(process.returncode, caught, signaled, ranks.stopped)
        if caught and code == 128 + caught[0]:
            say("interrupted" if caught[0] == signal.SIGINT else "terminated")
        elif code == 128 + signal.SIGKILL:
            say("error: the step was killed, as the system does where memory runs out (see dmesg)")
        return code


def exit_code(returncode: int, caught: Sequence[int], was_asked: bool, has_saved: bool) -> int:
    """train.py's exit code after a command; see `ProcessSupervisor.run`.

    Args:
        returncode: as `subprocess.Popen` has it, negative for a signal.
        caught: the signals to train.py, in order.
        was_asked: a process in its loop was asked to stop.
        has_saved: the loop has stopped and saved (`process_registry.mark_stopped`).
    """
    was_killed = not 0 <= returncode < 128  # a launcher turns the exit code of a stop into another
    if has_saved or (was_asked and was_killed and len(caught) < 2):
        return stop_signals.EXIT_CODE
    if caught and (len(caught) > 1 or not was_asked):
        if [*caught] == [signal.SIGUSR1]:  # SLURM's, while models load: requeue the job
            return stop_signals.EXIT_CODE
        return 128 + caught[0]
    return returncode if returncode >= 0 else 128 - returncode


def wait_until_free(output_dir: Path, machine: int = 0) -> bool:
    """Wait for processes left by a train.py that was killed; returns whether there were any.

    Raises:
        UserError: another train.py runs a step there, or the processes do not exit.
    """
    ranks = process_registry.ProcessRegistry(output_dir / process_registry.FOLDER)
    waited, deadline = False, time.monotonic() + watchdog.LONGEST_S
    while (holder := ranks.holder(machine)) and time.monotonic() < deadline:
        if holder.lives:
            raise _held(output_dir, f"another train.py ({holder.name})")
        if not waited:
            say(f"waiting: processes of a killed train.py still write to {output_dir}")
        waited = True
        time.sleep(0.05)
    pids = ranks.here()
    if holder or pids:
        which = f" (process {', '.join(map(str, pids))})" if pids else ""
        raise _held(output_dir, f"a run whose train.py was killed{which}")
    return waited


def _held(output_dir: Path, by: str) -> UserError:
    return UserError(
        f"--output_dir: {output_dir} is being written by {by}; stop it, or let it finish"
    )


def say(line: str) -> None:
    """Write a line to stderr; ignores a closed one."""
    with suppress(OSError):
        sys.stderr.write(f"{printable(line)}\n")


def _request_stop(
    ranks: process_registry.ProcessRegistry, command: int, relay: Optional[int]
) -> bool:
    """Signal each registered process once; returns whether there are any."""
    here = ranks.here()
    for pid in here:
        send(os.kill, pid, signal.SIGTERM)
    if not here and relay is not None and ranks.elsewhere():
        return send(os.kill, command, relay)
    return bool(here)


def _is_gone(process: subprocess.Popen) -> bool:
    """Whether no process of the command's group is left."""
    if process.poll() is not None:  # not before: Popen must reap its own process
        with suppress(ChildProcessError):  # reap orphans: train.py may be a container's init
            os.waitpid(-process.pid, os.WNOHANG)
    return not send(os.killpg, process.pid, 0)


_PREFLIGHT_S = 60.0  # for the checks and the estimate
_LONGEST_S = 300.0  # for the last report, which train.py waits for


def preflight_lines(request: PlanRequest, environment: Mapping[str, str]) -> list[str]:
    """Check data and models of all steps, and return the memory plan, one line per step. A failed
    estimate is one line too, not an error.

    Raises:
        UserError: a step names a model that does not exist, or local data or a local checkpoint
            that it cannot use.
    """
    for name in sorted(request.base_models):
        if not _is_here(name):
            return [f"no plan: the configuration of {name} is not cached, and the hub is offline"]
    command = [sys.executable, "-m", "dschat.launch.preflight"]
    try:
        done = subprocess.run(
            command,
            input=request.to_json(),
            env={**environment},
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
    """Whether a configuration can be loaded: from a folder, the hub, or its cache.

    Raises:
        UserError: the hub has no such model, or cannot be asked.
    """
    if name.startswith("builtin/"):
        return True
    folder = Path(os.path.expanduser(name))
    if os.path.isdir(folder):
        try:
            return "model_type" in json.loads(read_text(folder / "config.json"))
        except (OSError, ValueError, TypeError, RecursionError):
            return True  # broken: the estimate reports it
    from huggingface_hub import HfApi, constants, try_to_load_from_cache

    try:
        is_cached = isinstance(try_to_load_from_cache(name, "config.json"), str)
        if is_cached or constants.HF_HUB_OFFLINE:
            return is_cached
        reason = "" if HfApi().file_exists(name, "config.json") else "no such model on the hub"
    except Exception as error:  # no name of the hub, no network, or no access
        reason = f"the hub: {first_line(error)}"
    if reason:
        raise UserError(f"{name}: no such folder, and {reason}; check the name")
    return True


@dataclass(frozen=True)
class RunReport:
    """The report of the run in ``output_dir``."""

    output_dir: Path
    environment: Mapping[str, str]

    def is_current(self, marks: Iterable[Path]) -> bool:
        """Whether there is a page not older than any of ``marks``, files of finished steps."""
        page = self.output_dir / PAGE
        return page.exists() and all(mark.stat().st_mtime <= page.stat().st_mtime for mark in marks)

    def write(self) -> str:
        """Write the report; returns a line that says where, or why not."""
        try:
            done = subprocess.run(
                [sys.executable, "-m", "dschat.reporting", "--runs", str(self.output_dir)],
                env={**self.environment},
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
