"""Lets OpenMP's waiting threads sleep soon, which leaves busy cores to other processes.

Between two parallel operations libgomp's threads spin for milliseconds. If another program needs a
core, they spin while the thread that they wait for is not running.
"""

import os
import sys
import threading

_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
_MAX_TEAMS = 3

_is_late = False  # torch was loaded first
_parked: list[threading.Thread] = []


def limit_spinning() -> None:
    """Set libgomp's spin count unless the user has. libgomp reads it when torch loads it."""
    global _is_late
    if not any(name in os.environ for name in _VARIABLES):
        os.environ["GOMP_SPINCOUNT"] = "1000"
        _is_late = "torch" in sys.modules


def limit_spinning_late() -> None:
    """The same where torch was loaded before dschat.

    While a process has more OpenMP threads than cores, libgomp's threads spin for 100 rounds only
    (GOMP_SPINCOUNT in its manual). So teams of threads are started that sleep until the process
    exits.
    """
    if not _is_late or _parked:
        return
    import torch

    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    for _ in range(num_teams(torch.get_num_threads(), num_cores)):
        is_parked = threading.Event()
        thread = threading.Thread(target=_park, args=(is_parked,), name="openmp", daemon=True)
        thread.start()
        is_parked.wait()
        _parked.append(thread)


def num_teams(num_threads: int, num_cores: int) -> int:
    """Teams of ``num_threads`` that, with the main one, make more threads than cores; 0 where a
    process uses few of the cores.
    """
    if num_threads < 2 or num_cores < 1:
        return 0
    count = max(1, (num_cores - 1) // (num_threads - 1))  # the main thread is in its own team only
    return count if count <= _MAX_TEAMS else 0


def _park(is_parked: threading.Event) -> None:
    import torch

    torch.ones(torch.get_num_threads() << 16).add_(1.0)  # on all threads, which form a team
    is_parked.set()
    threading.Event().wait()
