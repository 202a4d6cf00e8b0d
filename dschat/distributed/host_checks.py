"""Checks standard streams and versions of libraries; says in a line which limit was reached."""

import errno
import os
import re
import resource
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any, Optional

from packaging.requirements import Requirement

from dschat.config.errors import require

_NO_MEMORY = "can't start new thread|(?i:can't|cannot|unable to) allocate|failed to map segment"
_OUTPUT = (errno.ENOSPC, errno.EDQUOT, errno.EPIPE, errno.EIO, errno.EFBIG)  # of a failed write
closed: list[str] = []  # which of "stdin", "stdout", "stderr" were closed at the start


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
