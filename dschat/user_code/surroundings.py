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


@contextmanager
def restored(label: str) -> Iterator[None]:
    """A scope for the user's code, which ``label`` names.

    Its end puts torch's default dtype back; when no other one is open, the working directory too.
    The first time, a warning says so.
    """
    global _num_open, _folder, _dtype
    with _lock:
        if not _num_open:
            _folder, _dtype = _state()
        _num_open += 1
    try:
        yield
    finally:
        with _lock:
            _num_open -= 1
            _put_back(label)


def _put_back(label: str) -> None:
    folder, dtype = _state()
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
