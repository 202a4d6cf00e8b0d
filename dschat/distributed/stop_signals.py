"""Stops training on a signal: after the current step, on all ranks together, with a checkpoint.

While a loop runs that can save, SIGINT (Ctrl-C), SIGTERM, SIGUSR1 and SIGHUP (the terminal was
closed) are recorded; the loop calls `agreed` after every step, and raises `TrainingStopped` once
its checkpoint is written. Outside of such a loop signals keep their default actions.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import dschat.distributed as dist
from dschat.distributed import failure_detector, process_registry

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
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
    """The signals that ask a loop to stop.

    1. `listening`: Python's handler in C writes the number of each signal to a pipe at once, even
       while the main thread waits in a collective, where no handler in Python would run. (That is
       why a flag set by such a handler would not do: a rank whose peer hangs could not be stopped.)
    2. A thread reads the pipe. The first signal is recorded; a second one exits at once.
    3. After each step the loop asks `agreed`; it saves and raises `TrainingStopped`.
    4. At the end the handlers are restored, and the thread ends by a number that is no signal's.

    Signals are blocked during a fork, which gets default handlers before it receives any: its copy
    of the pipe is its parent's.
    """

    _END: ClassVar[int] = 0
    current: ClassVar["StopRequest | None"] = None  # the one that listens in this process

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None  # the signal, and its time
        self.handlers: dict[int, Any] = {}  # of `SIGNALS` before, unless ignored
        self._pipe: tuple[int, int] | None = None  # read, write

    def agreed(self) -> bool:
        """Collective. Whether any rank received a signal; call it after a step."""
        is_requested = self._first is not None
        return is_requested if dist.world_size() == 1 else dist.max_int(is_requested) > 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """A scope in which a thread takes each signal; ignored signals stay ignored."""
        self._pipe = reader, writer = os.pipe()
        os.set_blocking(writer, False)
        self.handlers = {s: h for s in SIGNALS if (h := signal.getsignal(s)) is not signal.SIG_IGN}
        wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for signum in self.handlers:
            signal.signal(signum, _do_nothing)
        StopRequest.current = self
        thread = threading.Thread(target=self._listen, args=(reader,), name="signals", daemon=True)
        thread.start()
        try:
            yield
        finally:
            StopRequest.current = None
            for signum, handler in self.handlers.items():
                signal.signal(signum, handler)
            signal.set_wakeup_fd(wakeup)
            os.set_blocking(writer, True)
            os.write(writer, bytes([self._END]))  # not end of file: a fork may hold the pipe open
            thread.join()
            os.close(writer)
            os.close(reader)

    def _listen(self, reader: int) -> None:
        numbers = b""
        while self._END not in numbers:
            numbers = os.read(reader, 64)
            for signum in numbers:
                if signum in SIGNALS:
                    self._take(signum)

    def _take(self, signum: int) -> None:
        """Record a signal. A second one exits at once: the main thread may wait in a collective
        that never returns.
        """
        now = time.monotonic()
        if self._first is None:
            self._first = signum, now
            if failure_detector.first_failure() is None:  # else the launcher ends the others
                _print("stopping after this step; a second signal ends it at once")
            return
        first, since = self._first
        if signum == first == signal.SIGINT or now - since > REPEATED_S:
            _print("interrupted" if signum == signal.SIGINT else "terminated")
            failure_detector.announce_exit(128 + signum)
            os._exit(128 + signum)

    def reset(self) -> None:
        """In a fork: default handlers, so that ``multiprocessing``'s ``terminate()`` ends it."""
        StopRequest.current = None
        signal.set_wakeup_fd(-1)
        for signum in self.handlers:
            is_int = signum == signal.SIGINT
            signal.signal(signum, signal.default_int_handler if is_int else signal.SIG_DFL)
        for descriptor in self._pipe or ():
            os.close(descriptor)


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
    if threading.current_thread() is not threading.main_thread() or StopRequest.current:
        yield request
        return
    try:
        with request.listening(), process_registry.registered(output_dir):
            yield request
    except TrainingStopped:
        if dist.is_main_process():
            process_registry.mark_stopped(output_dir)
        if dist.world_size() > 1:
            dist.barrier()  # NOTE: as soon as one has exited with this code, SLURM kills the others
        raise


def _do_nothing(*_: Any) -> None:
    """The handler in Python: the thread has read the number already."""


# Mask of a thread before its fork, whether or not a request listens: one may start in between.
_forking = threading.local()


def _block_signals() -> None:
    request = StopRequest.current
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, request.handlers if request else ())


def _unblock_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _reset_in_fork() -> None:
    if StopRequest.current is not None:
        StopRequest.current.reset()
    _unblock_signals()


os.register_at_fork(
    before=_block_signals, after_in_parent=_unblock_signals, after_in_child=_reset_in_fork
)
