"""Checks a launcher's variables, the process's limits, its standard streams and installed versions.

A value that cannot work is one line before anything loads; so is a limit that is reached later.
"""

import errno
import os
import re
import resource
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any, Optional

from packaging.requirements import Requirement

from dschat.config import UserError
from dschat.config.errors import require
from dschat.distributed.env import VARIABLES, rank, world_size

NUM_FILES = 64  # open files that a process needs
_ACCELERATORS = ("cpu", "cuda")
_NO_MEMORY = "can't start new thread|(?i:can't|cannot|unable to) allocate|failed to map segment"
_OUTPUT = (errno.ENOSPC, errno.EDQUOT, errno.EPIPE, errno.EIO, errno.EFBIG)  # of a failed write
closed: list[str] = []  # which of "stdin", "stdout", "stderr" were closed at the start


def check() -> None:
    """Raise ``UserError`` for the first variable or limit that cannot work."""
    for name in VARIABLES:
        value = os.environ.get(name, "0")
        require(
            value.isdecimal(),
            f"{name}={value} in the environment is not a whole number; unset it, or leave it to a "
            "launcher",
        )
    rank_here, size = rank(), world_size()
    require(
        rank_here < size,
        f"rank {rank_here} of {size} processes in the environment: ranks start at 0; set "
        "RANK and WORLD_SIZE right, or leave them to a launcher",
    )
    port = os.environ.get("MASTER_PORT", "29500")
    require(
        port.isdecimal() and 1 <= int(port) <= 65535,
        f"MASTER_PORT={port} in the environment is not a port, from 1 to 65535; set another",
    )
    accelerator = os.environ.get("DS_ACCELERATOR", "cpu")
    require(
        accelerator in _ACCELERATORS,
        f"DS_ACCELERATOR={accelerator} in the environment: dschat knows "
        f"{' and '.join(_ACCELERATORS)}; unset it",
    )
    _allow_files()


def check_versions() -> None:
    """Raise ``UserError`` for an installed library of a version that pyproject.toml excludes."""
    if {"-h", "--help"} & set(sys.argv):  # which answers at once
        return
    for line in _about("dschat", metadata.requires) or []:
        wanted = Requirement(line)
        if "dev" in str(wanted.marker):  # tools, which a run does not use
            continue
        found = _about(wanted.name, metadata.version)  # None: an extra's, or its import will say so
        require(
            found is None or wanted.specifier.contains(found, prereleases=True),
            f"{wanted.name} {found} does not work with dschat: pip install "
            f"'{wanted.name}{wanted.specifier}'",
        )


def _about(name: str, fact: Callable[[str], Any]) -> Any:
    try:
        return fact(name)
    except metadata.PackageNotFoundError:
        return None


def _allow_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= NUM_FILES:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (NUM_FILES, hard))
    except (ValueError, OSError):
        raise UserError(
            f"a process may open {hard} files here (ulimit -n) and needs {NUM_FILES}; raise that"
        ) from None


def plug_streams() -> None:
    """Open /dev/null for closed standard streams: the next open file would take their number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            closed.append(name)
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", closefd=False))


def shortage(error: BaseException) -> Optional[str]:
    """The error line for an exception from a limit of this machine; None for any other."""
    text = (str(error).splitlines() or [""])[0]
    if isinstance(error, MemoryError) or re.search(_NO_MEMORY, text):
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        current = (
            "" if limit == resource.RLIM_INFINITY else f" of {limit / 2**30:.1f} GiB (ulimit -v)"
        )
        return f"out of memory{f' ({text})' if text else ''}; raise the limit{current}, or use less"
    if not isinstance(error, OSError):
        return None
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"{text}; raise the limit (ulimit -n)"
    return output_failure(b"\n") if error.errno in _OUTPUT and not error.filename else None


def output_failure(more: bytes = b"") -> Optional[str]:
    """The error line where standard output cannot be flushed or ``more`` written (a full disk).

    Later output is discarded then.
    """
    try:
        sys.stdout.flush()
        if more:
            os.write(sys.stdout.fileno(), more)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return f"standard output cannot be written: {error.strerror}"
    return None
