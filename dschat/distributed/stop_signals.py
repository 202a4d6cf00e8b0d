"""A signal asks training to stop: at the next step's boundary, on all processes together, saved.

Signals come in (Ctrl-C, SIGTERM, SIGUSR1) while a loop runs that can save; the loop asks `agreed`
at every boundary, and raises `TrainingStopped` once its checkpoint is written. Outside of such a
loop signals do what they always do. It must not know what a step is, nor how it is saved.
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
EXIT_CODE = 75  # EX_TEMPFAIL of BSD's sysexits.h: not an error; try again
LAUNCHED_BY = "DSCHAT_LAUNCHED_BY"  # the process id of a train.py that runs us
REPEATED_S = 1.0  # launchers pass on what the terminal sent to all: both are one wish


class TrainingStopped(Exception):
    """Training stopped as it was asked to, after ``step``. ``saved``: its newest checkpoint, of
    that step or, where it could not be written, of one before.
    """

    def __init__(self, step: int, saved: Path | None) -> None:
        where = f"saved in {saved}" if saved else "nothing is saved"
        super().__init__(f"stopped at step {step}, {where}")
        self.step, self.saved = step, saved


class StopRequest:
    """Whether somebody wants training to stop."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None  # the signal, and when it came

    def agreed(self) -> bool:
        """Collective. Whether any process was asked to; the same answer on all. For boundaries."""
        asked = self._first is not None
        return asked if dist.world_size() == 1 else dist.max_int(asked) > 0

    def take(self, signum: int) -> None:
        """A signal has come. A second one ends this process where it stands: it may wait in a
        collective that never returns.
        """
        now = time.monotonic()
        if self._first is None:
            self._first = signum, now
            if dist.first_failure() is None:  # else it is the launcher, ending what is left
                _say("stopping after this step; a second signal ends it at once")
            return
        first, since = self._first
        if signum == first == signal.SIGINT or now - since > REPEATED_S:
            _say("interrupted" if signum == signal.SIGINT else "terminated")
            dist.announce_exit(128 + signum)
            os._exit(128 + signum)


def _say(line: str) -> None:
    """Once, and at once; train.py says so itself."""
    if dist.is_main_process() and LAUNCHED_BY not in os.environ:
        with suppress(OSError):  # the terminal is gone, or what we were piped into
            os.write(2, f"{line}\n".encode())


@contextmanager
def handle_stop_signals(output_dir: str | Path) -> Iterator[StopRequest]:
    """Collective where it ends by `TrainingStopped`. In the block signals ask to stop; those that
    are ignored stay so. ``output_dir``: where ``train.py`` finds this process.

    Where Python takes no signals (another thread than the main one), nobody will ask; nor in a
    block within a block, where the outer one is asked.
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
            dist.barrier()  # NOTE as soon as one has left with this code, SLURM kills the others
        raise


@contextmanager
def _listening(request: StopRequest) -> Iterator[None]:
    """Hand each signal to ``request``, from a thread of its own.

    NOTE a handler in Python waits until the main thread runs Python again, which in a collective
    may be never. What Python's own handler in C does at once is to write to the wakeup descriptor.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = {s: h for s in SIGNALS if (h := signal.getsignal(s)) is not signal.SIG_IGN}
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for signum in before:
        signal.signal(signum, _leave_it_to_the_thread)
    _caught_here.extend(before)
    _pipe.extend((reader, writer))
    thread = threading.Thread(target=_listen, args=(reader, request), name="signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        _caught_here.clear()
        for signum, handler in before.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(wakeup)
        os.set_blocking(writer, True)
        os.write(writer, bytes([_NO_MORE]))  # no end of file: a fork may have the pipe open
        thread.join()
        _pipe.clear()
        os.close(writer)
        os.close(reader)


def _listen(reader: int, request: StopRequest) -> None:
    numbers = b""
    while _NO_MORE not in numbers:
        numbers = os.read(reader, 64)
        for signum in numbers:
            if signum in SIGNALS:
                request.take(signum)


def _leave_it_to_the_thread(*_: Any) -> None:
    """The handler in Python; the thread has the number already."""


_NO_MORE = 0  # no signal has this number
_caught_here: list[signal.Signals] = []  # in the block
_pipe: list[int] = []  # its descriptors, in the block
_forking = threading.local()  # the signals that this thread held back before


def _hold_back() -> None:
    """A signal that came to a fork before `_reset_in_fork` would go into its parent's pipe."""
    _forking.held = signal.pthread_sigmask(signal.SIG_BLOCK, _caught_here)


def _let_come() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.held)


def _reset_in_fork() -> None:
    """As in a new process: so that ``multiprocessing``'s ``terminate()`` ends it."""
    if _caught_here:
        signal.set_wakeup_fd(-1)
        for signum in _caught_here:
            is_int = signum == signal.SIGINT
            signal.signal(signum, signal.default_int_handler if is_int else signal.SIG_DFL)
        _caught_here.clear()
        for descriptor in _pipe:
            os.close(descriptor)
        _pipe.clear()
    _let_come()


os.register_at_fork(before=_hold_back, after_in_parent=_let_come, after_in_child=_reset_in_fork)
