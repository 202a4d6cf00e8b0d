"""Stops training on a signal: after the current step, on all ranks together, with a checkpoint.

While a loop runs that can save, SIGINT (Ctrl-C), SIGTERM and SIGUSR1 are recorded; the loop calls
`agreed` after every step, and raises `TrainingStopped` once its checkpoint is written. Outside of
such a loop signals keep their default actions.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import dschat.distributed as dist
from dschat.distributed import process_registry

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
EXIT_CODE = 75  # EX_TEMPFAIL of BSD's sysexits.h: try again later
LAUNCHED_BY = "DSCHAT_LAUNCHED_BY"  # variable: process id of the train.py that started this one
REPEATED_S = 1.0  # a launcher passes on what the terminal sent to all: both are one request


class TrainingStopped(Exception):
    """Training stopped on request after ``step``. ``saved``: the latest checkpoint, which is older
    than ``step`` where that could not be written.
    """

    def __init__(self, step: int, saved: Path | None) -> None:
        where = f"saved in {saved}" if saved else "nothing is saved"
        super().__init__(f"stopped at step {step}, {where}")
        self.step, self.saved = step, saved


class StopRequest:
    """The signals received so far."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None  # the signal, and its time

    def agreed(self) -> bool:
        """Collective. Whether any rank received a signal; call it after a step."""
        is_requested = self._first is not None
        return is_requested if dist.world_size() == 1 else dist.max_int(is_requested) > 0

    def take(self, signum: int) -> None:
        """Record a signal. A second one exits at once: the main thread may wait in a collective
        that never returns.
        """
        now = time.monotonic()
        if self._first is None:
            self._first = signum, now
            if dist.first_failure() is None:  # else the launcher is ending the other ranks
                _print("stopping after this step; a second signal ends it at once")
            return
        first, since = self._first
        if signum == first == signal.SIGINT or now - since > REPEATED_S:
            _print("interrupted" if signum == signal.SIGINT else "terminated")
            dist.announce_exit(128 + signum)
            os._exit(128 + signum)


def _print(line: str) -> None:
    """Unbuffered, on rank 0; not under train.py, which prints the line itself."""
    if dist.is_main_process() and LAUNCHED_BY not in os.environ:
        with suppress(OSError):  # the terminal or the reader of the pipe is gone
            os.write(2, f"{line}\n".encode())


@contextmanager
def handle_stop_signals(output_dir: str | Path) -> Iterator[StopRequest]:
    """A scope in which signals request a stop; ignored signals stay ignored.

    Collective where it ends by `TrainingStopped`. ``output_dir``: where ``train.py`` finds this
    process. Outside the main thread, where Python handles no signals, nothing is requested; nor in
    a nested scope, where the outer one gets the signals.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread() or _pipe:
        yield request
        return
    try:
        with _listening(request), process_registry.registered(output_dir):
            yield request
    except TrainingStopped:
        if dist.is_main_process():
            process_registry.mark_stopped(output_dir)
        if dist.world_size() > 1:
            dist.barrier()  # NOTE: as soon as one has exited with this code, SLURM kills the others
        raise


@contextmanager
def _listening(request: StopRequest) -> Iterator[None]:
    """A scope in which a thread passes each signal to ``request``.

    NOTE: a handler in Python waits until the main thread runs Python again, which in a collective
    may be never. Python's handler in C writes to the wakeup descriptor at once.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = {s: h for s in SIGNALS if (h := signal.getsignal(s)) is not signal.SIG_IGN}
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for signum in before:
        signal.signal(signum, _do_nothing)
    _handled.extend(before)
    _pipe.extend((reader, writer))
    thread = threading.Thread(target=_listen, args=(reader, request), name="signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        _handled.clear()
        for signum, handler in before.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(wakeup)
        os.set_blocking(writer, True)
        os.write(writer, bytes([_END]))  # not end of file: a fork may hold the pipe open
        thread.join()
        _pipe.clear()
        os.close(writer)
        os.close(reader)


def _listen(reader: int, request: StopRequest) -> None:
    numbers = b""
    while _END not in numbers:
        numbers = os.read(reader, 64)
        for signum in numbers:
            if signum in SIGNALS:
                request.take(signum)


def _do_nothing(*_: Any) -> None:
    """The handler in Python: the thread has read the number already."""


_END = 0  # is not the number of any signal
_handled: list[signal.Signals] = []  # in the scope
_pipe: list[int] = []  # its descriptors, in the scope
_forking = threading.local()  # the signal mask of this thread before the fork


def _block_signals() -> None:
    """A signal to a fork before `_reset_in_fork` would go into its parent's pipe."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _handled)


def _unblock_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _reset_in_fork() -> None:
    """Default handlers, so that ``multiprocessing``'s ``terminate()`` ends a fork."""
    if _handled:
        signal.set_wakeup_fd(-1)
        for signum in _handled:
            is_int = signum == signal.SIGINT
            signal.signal(signum, signal.default_int_handler if is_int else signal.SIG_DFL)
        _handled.clear()
        for descriptor in _pipe:
            os.close(descriptor)
        _pipe.clear()
    _unblock_signals()


os.register_at_fork(
    before=_block_signals, after_in_parent=_unblock_signals, after_in_child=_reset_in_fork
)
