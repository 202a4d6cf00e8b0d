"""Exits a rank, and tells the others; asks the failure detector about theirs. Loads no torch."""

import atexit
import os
import sys
from contextlib import suppress
from typing import NoReturn

from dschat.distributed.env import world_size
from dschat.distributed.failure_detector import FailureDetector, RankFailure

_detectors: list[FailureDetector] = []  # one, where the world size is above 1


def watch(detector: FailureDetector) -> None:
    """Use ``detector`` from now on."""
    _detectors[:] = [detector]


def exit_process(code: int) -> NoReturn:
    """Exit; one of several ranks, or with vLLM, without tearing down the interpreter.

    NOTE: a gloo thread that drops a tensor of the last collective takes the interpreter's lock. If
    the interpreter is being torn down by then, the thread aborts the process (SIGABRT), even after
    `shutdown` where something still refers to the group. So the exit handlers run and the output
    is flushed, but the teardown is skipped. In that, libraries of vLLM print what they leak.
    """
    alone = world_size() == 1 and "vllm" not in sys.modules
    if alone or "torch.distributed" not in sys.modules:
        sys.exit(code)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, full, or none
            stream.flush()
    os._exit(code)


def announce_exit(code: int) -> None:
    """Tell the other ranks that this one exits, and with which code.

    They exit too where it is not 0, or where a rank ends without this call (SIGKILL).
    """
    for detector in _detectors:
        detector.announce_exit(code)


def is_watched() -> bool:
    """Whether a failure detector runs."""
    return bool(_detectors)


def first_failure(wait_s: float = 0.0) -> RankFailure | None:
    """The first failure of another rank that is known within ``wait_s``."""
    return _detectors[0].first_failure(wait_s) if _detectors else None
