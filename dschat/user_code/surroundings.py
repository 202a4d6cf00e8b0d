"""Keeps what the user's code does to this process from changing the run."""

import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

logger = logging.getLogger("dschat")

_lock = threading.Lock()
_num_open = 0  # scopes
_folder, _dtype = "", None  # before the first of these
_copies: dict[int, int] = {}  # of the standard streams


@contextmanager
def restored(label: str) -> Iterator[None]:
    """A scope for the user's code, which ``label`` names.

    Its end puts torch's default dtype and closed standard streams back; when no other one is open,
    the working directory too. The first time, a warning says so. The process exits where all its
    files were closed.
    """
    global _num_open, _folder, _dtype
    with _lock:
        if not _num_open:
            _folder, _dtype = _state()
            if not _copies:
                _copies.update({n: os.dup(n) for n in range(3) if _is_open(n)})
        _num_open += 1
    try:
        yield
    finally:
        with _lock:
            _num_open -= 1
            _put_back(label)


def _put_back(label: str) -> None:
    if _copies and not any(map(_is_open, _copies.values())):
        with suppress(OSError):
            os.write(2, f"error: {label} closed the files of the run's process; fix it\n".encode())
        os._exit(2)
    folder, dtype = _state()
    for stream, copy in _copies.items():
        if not _is_open(stream):
            os.dup2(copy, stream)
            _warn(f"{label} closed standard stream {stream}: opened again")
    if dtype != _dtype is not None:
        sys.modules["torch"].set_default_dtype(_dtype)
        _warn(f"{label} changed torch's default dtype: put back")
    if not _num_open and folder != _folder:
        with suppress(OSError):  # it has been removed
            os.chdir(_folder)
        _warn(f"{label} changed the working directory: put back; use absolute paths there")


@cache
def _warn(message: str) -> None:
    logger.warning("%s", message)


def _state() -> tuple[str, Any]:
    """The working directory, "" where it has been removed, and torch's default dtype."""
    torch = sys.modules.get("torch")
    dtype = torch and torch.get_default_dtype()
    try:
        return os.getcwd(), dtype
    except OSError:
        return "", dtype


def _is_open(descriptor: int) -> bool:
    try:
        return bool(os.fstat(descriptor))
    except OSError:
        return False
