"""Settings of libraries that decide how fast a process computes: threads, memory, attention."""

import ctypes
import os

# -- openmp ----------------------------------------------------------------------------------------
#
# Lets OpenMP's waiting threads sleep soon, which leaves busy cores to other processes.
#
# Between two parallel operations libgomp's threads spin for milliseconds. If another program needs
# a core, they spin while the thread that they wait for is not running.

_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def limit_spinning() -> None:
    """Set libgomp's spin count unless the user has. libgomp reads it when torch loads it: without
    effect where a program imports torch before dschat.
    """
    if not any(name in os.environ for name in _VARIABLES):
        os.environ["GOMP_SPINCOUNT"] = "1000"


def num_cores() -> int:
    """Number of CPU cores available to this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# -- malloc ----------------------------------------------------------------------------------------
#
# Lets glibc keep large blocks that are freed, so that the next ones need no new pages.
#
# By default glibc maps every block above 32 MiB and unmaps it when it is freed. Activations of a
# long micro-batch are such blocks: the kernel then clears all their pages again and again (a fourth
# of the processor time of a training step of 16,384 tokens; with what is set here, 1.5%).

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of mallopt(3)


def _glibc() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(None)
    except OSError:
        return None
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None


def keep_freed_memory() -> None:
    """From now on, keep freed blocks of any size for later ones. MALLOC_* variables of the
    environment have precedence; does nothing without glibc.
    """
    library = _glibc()
    if library is None or any(name.startswith("MALLOC_") for name in os.environ):
        return
    library.mallopt(_MMAP_MAX, 0)
    library.mallopt(_TRIM_THRESHOLD, -1)


def return_freed_memory() -> None:
    """Give the pages of freed blocks back to the system, which then counts them as available."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


# -- attention -------------------------------------------------------------------------------------
#
# Turns off cuDNN's attention, which torch 2.11 and later prefer on Hopper.
#
# cuDNN makes a plan for each new shape, which takes tenths of a second; packed rows and batches of
# prompts rarely have the same shape twice. Its gradient of masked attention is NaN for some lengths
# (pytorch#196678).


def avoid_cudnn_attention() -> None:
    """Attention of this process runs by torch's other kernels: flash, memory-efficient or math."""
    import torch

    torch.backends.cuda.enable_cudnn_sdp(False)
