"""Runs a step's command, and ends it: in peace where its processes can stop, and completely.

A command, its environment and the folder that it writes into come in; an exit code goes out. It
must not know what a step is.

The first signal to ``train.py`` goes to each process that is registered
(`dschat.distributed.process_registry`), once:
launchers would pass it on to one after another and kill what takes 30 seconds, or drop it. They
save and leave. Where no process can stop so, and at a second signal, everything ends at once.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Optional

from dschat.config import UserError
from dschat.distributed import process_registry, stop_signals
from dschat.launch import watchdog
from dschat.launch.cluster import Cluster
from dschat.launch.watchdog import GRACE_S, send

SIGNALS = (*stop_signals.SIGNALS, signal.SIGHUP)  # the last where a terminal closes


class ProcessSupervisor:
    """Runs commands while signals are caught, in a ``with`` block of its own."""

    def __init__(self) -> None:
        self._caught: list[int] = []
        self._before = ExitStack()

    def __enter__(self) -> "ProcessSupervisor":
        for signum in SIGNALS:
            handler = signal.getsignal(signum)
            if handler is not signal.SIG_IGN:  # nohup, or a shell's background
                signal.signal(signum, lambda number, _frame: self._caught.append(number))
                self._before.callback(signal.signal, signum, handler)
        return self

    def __exit__(self, *_: Any) -> None:
        self._before.close()

    @property
    def asked(self) -> bool:
        """Whether a signal has come: nothing more is to be started."""
        return bool(self._caught)

    def run(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        output_dir: Path,
        nodes: Cluster,
    ) -> int:
        """Run ``command`` in a process group of its own, wait for it, and return its exit code.

        75 where it was asked to stop and did, saved; 130 for Ctrl-C and 143 for SIGTERM where it
        could not, while models load, but 75 for SIGUSR1. However the command ends, no process of
        its group is left.
        """
        with ExitStack() as block:
            try:
                ranks = block.enter_context(process_registry.opened(output_dir, nodes.number_here))
            except BlockingIOError:
                raise _held(output_dir, "another train.py") from None
            announce = block.enter_context(watchdog.watched(ranks, environment))
            ours = {stop_signals.LAUNCHED_BY: str(os.getpid())}
            process = subprocess.Popen(
                command, env={**environment, **ours}, start_new_session=True, preexec_fn=announce
            )
            while process.poll() is None and not self.asked:
                time.sleep(0.05)
            told = process.poll() is None and _ask(ranks, process.pid, nodes.relay)
            if told:
                say("stopping after this step; a second signal ends it at once")
            # A launcher may have died of the signal, if that came to it too; its processes stop.
            while told and len(self._caught) < 2 and (process.poll() is None or ranks.here()):
                time.sleep(0.05)
            _end_group(process, self._caught, ranks)
            killed = not 0 <= process.returncode < 128
            if ranks.stopped or (told and killed and len(self._caught) < 2):
                return stop_signals.EXIT_CODE
        code = process.returncode if process.returncode >= 0 else 128 - process.returncode
        if not self.asked or (told and len(self._caught) < 2):
            return code
        if self._caught[0] == signal.SIGUSR1 and len(self._caught) < 2:
            return stop_signals.EXIT_CODE  # SLURM's: nothing is lost that a job could go on with
        interrupted = self._caught[0] == signal.SIGINT
        say("interrupted" if interrupted else "terminated")
        return 128 + self._caught[0]


def wait_until_free(output_dir: Path, machine: int = 0) -> bool:
    """Wait for what is left of a step whose train.py was killed; whether there was any.

    Raises:
        UserError: another train.py runs a step there, or its processes do not end.
    """
    ranks = process_registry.ProcessRegistry(output_dir / process_registry.FOLDER)
    waited, deadline = False, time.monotonic() + watchdog.LONGEST_S
    while (holder := ranks.holder(machine)) and time.monotonic() < deadline:
        if holder.lives:
            raise _held(output_dir, f"another train.py ({holder.name})")
        if not waited:
            say(f"waiting: the processes of a train.py that was killed still write {output_dir}")
        waited = True
        time.sleep(0.05)
    pids = ranks.here()
    if holder or pids:
        which = f" (process {', '.join(map(str, pids))})" if pids else ""
        raise _held(output_dir, f"a run that lost its train.py{which}")
    return waited


def _held(output_dir: Path, by: str) -> UserError:
    return UserError(
        f"--output_dir: {output_dir} is being written by {by}; end that, or let it finish"
    )


def say(line: str) -> None:
    """A line on standard error, as long as somebody reads it."""
    with suppress(OSError):
        sys.stderr.write(f"{line}\n")


def _ask(ranks: process_registry.ProcessRegistry, command: int, relay: Optional[int]) -> bool:
    """One signal to each process that can stop; whether there are any."""
    here = ranks.here()
    for pid in here:
        send(os.kill, pid, signal.SIGTERM)
    if not here and relay is not None and ranks.elsewhere():
        return send(os.kill, command, relay)
    return bool(here)


def _end_group(
    process: subprocess.Popen, caught: Sequence[int], ranks: process_registry.ProcessRegistry
) -> None:
    """SIGTERM to what is left of the group; after ``GRACE_S`` or a second signal, SIGKILL."""
    # NOTE SIGTERM for Ctrl-C too: DeepSpeed's launcher answers SIGINT with a traceback of its own.
    send(os.killpg, process.pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while send(os.killpg, process.pid, 0) and time.monotonic() < deadline and len(caught) < 2:
        if process.poll() is not None:  # then only: Popen must be the one to reap its own process
            with suppress(ChildProcessError):  # orphans are ours to reap in a container's init
                os.waitpid(-process.pid, os.WNOHANG)
        time.sleep(0.05)
    send(os.killpg, process.pid, signal.SIGKILL)
    for pid in ranks.here():  # those that a remote shell started are in no group of ours
        send(os.kill, pid, signal.SIGKILL)
    process.wait()
