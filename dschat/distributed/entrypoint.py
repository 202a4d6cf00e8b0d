"""Runs a command's ``main``: one line and an exit code for what a user can fix.

A ``UserError`` exits with 2, diverged training with 1, stopped training with 75, Ctrl-C with 130,
SIGTERM with 143.
"""

import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NoReturn

import dschat.distributed as dist
from dschat.config import UserError
from dschat.config.errors import printable
from dschat.distributed import failure_detector, host_checks, stop_signals
from dschat.distributed.machine import is_full
from dschat.distributed.stop_signals import LAUNCHED_BY
from dschat.startup import is_importing

SAME_ERROR_S = 3.0  # within which rank 0 finds the same mistake
FAILURE_NEWS_S = 1.0  # within which ranks learn of a failure
_speaks: Callable[[], bool] = dist.is_main_process  # whether this process prints


def run(main: Callable[[], int | None], joins_group: bool = True) -> NoReturn:
    """Call ``main`` and exit with its code, or with one line and a code of the above.

    Only rank 0 prints the line, or every process of a command that never ``joins_group``. Any other
    exception is a bug and keeps its traceback, unless another rank failed first and printed its
    own.
    """
    global _speaks
    _speaks = dist.is_main_process if joins_group else lambda: True
    host_checks.plug_streams()
    try:
        host_checks.check()
    except UserError as error:  # its rank is unknown: every process prints it
        sys.stderr.write(f"error: {printable(str(error))}\n")
        sys.exit(2)
    before = {}
    if (handler := signal.getsignal(signal.SIGINT)) is not signal.SIG_IGN:
        before[signal.SIGINT] = handler
    # One of several ranks may wait in a collective, where no Python runs: its SIGTERM stays.
    if dist.world_size() == 1:
        before[signal.SIGTERM] = signal.getsignal(signal.SIGTERM)
    try:
        for signum in before:
            signal.signal(signum, _raise_or_exit)
        host_checks.check_versions()
        code = main() or 0
    except UserError as error:
        _refuse(" ".join(str(error).splitlines()))
        code = 2
    except FloatingPointError as error:
        _print(f"error: {error}")
        code = 1
    except stop_signals.TrainingStopped as stop:
        code = _stopped(stop)
    except SystemExit as error:  # --help
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except KeyboardInterrupt:
        code = _print_signal(signal.SIGINT)
    except _Terminated:
        code = _print_signal(signal.SIGTERM)
    except Exception as error:
        code = _unexpected(error)
    finally:
        for signum, handler in before.items():
            if signal.getsignal(signum) in (_raise_or_exit, signal.SIG_DFL):
                signal.signal(signum, handler)
    if code == 0 and (failure := host_checks.output_failure()):
        sys.stderr.write(f"error: {failure}\n")
        code = 1
    failure_detector.announce_exit(code)
    failure_detector.exit_process(code)


def say_next(*commands: Sequence[str]) -> None:
    """Print ``commands`` of dschat that go on from a finished step; train.py prints its own."""
    dschat = "dschat" if sys.argv[0].startswith("dschat ") else "python -m dschat"
    for words in commands if LAUNCHED_BY not in os.environ else ():
        _print(f"next: {dschat} {shlex.join(words)}")


def _refuse(message: str) -> None:
    """Print a user's mistake: on rank 0, or on another rank that fails alone."""
    message = printable(message)
    _print(f"error: {message}")
    if _speaks():
        return
    # NOTE: the launcher stops all ranks as soon as one exits: rank 0 prints the reason first.
    if not failure_detector.is_watched():
        time.sleep(SAME_ERROR_S)
    elif failure_detector.first_failure(SAME_ERROR_S) is None:
        sys.stderr.write(f"error: process {dist.rank()}: {message}\n")


def _stopped(stop: stop_signals.TrainingStopped) -> int:
    if LAUNCHED_BY not in os.environ:
        remedy = "; the same command with --resume latest resumes from there"
        _print(f"{stop}{remedy if stop.saved else ''}")
    dist.shutdown()
    return stop_signals.EXIT_CODE


def _unexpected(error: Exception) -> int:
    """The exit code after one line about a full disk or memory; else a bug, with its traceback.
    Neither is printed where another rank failed first.
    """
    shortage = host_checks.shortage(error)
    if shortage is None and is_full(error):
        name = getattr(error, "filename", None)
        where = f": {name}" if name else ""
        _refuse(f"no space left on the disk{where}; free some, then run the same command again")
        return 2
    if shortage is None and dist.world_size() == 1:
        raise error
    failure = failure_detector.first_failure(FAILURE_NEWS_S)
    if failure is not None:
        return failure.code or 1
    if shortage:
        sys.stderr.write(f"error: {shortage}\n")
    else:
        sys.excepthook(*sys.exc_info())
    return 1


class _Terminated(BaseException):
    """SIGTERM arrived."""


def _raise_or_exit(signum: int, frame: FrameType | None) -> NoReturn:
    """Raise in `main`; inside an import, where exceptions may be lost, exit at once."""
    if signum == signal.SIGTERM:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second SIGTERM ends the process at once
    if is_importing(frame):
        code = _print_signal(signum)
        failure_detector.announce_exit(code)
        os._exit(code)
    raise KeyboardInterrupt if signum == signal.SIGINT else _Terminated


def _print_signal(signum: int) -> int:
    """Print the line for SIGINT or SIGTERM; returns the exit code."""
    if signum == signal.SIGINT:
        _print("interrupted")
    elif os.environ.get(LAUNCHED_BY) != str(os.getppid()):  # else train.py prints it
        _print("terminated")
    return 128 + signum


def _print(line: str) -> None:
    if _speaks():
        sys.stderr.write(f"{printable(line)}\n")
