"""Keeps what the user's code does to this process from changing the run."""

import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

logger = logging.getLogger("dschat")

_lock = threading.Lock()
_num_open = 0  # scopes
_ours: dict[str, Any] = {}  # before the first of these
_their_folder = ""
_copies: dict[int, int] = {}  # of the standard streams


@contextmanager
def restored(label: str) -> Iterator[None]:
    """A scope for the user's code, which ``label`` names: it has the working directory that it had
    last, and the run has its own again when the last of these scopes ends.

    The end of each puts torch's default dtype and closed standard streams back, with a warning. The
    process exits where all its files were closed.
    """
    global _num_open, _ours
    with _lock:
        if not _num_open:
            _ours = _state()
            _copies.update({n: os.dup(n) for n in _ours["streams"] if n not in _copies})
            with suppress(OSError):  # it has been removed
                os.chdir(_their_folder or _ours["folder"])
        _num_open += 1
    try:
        yield
    finally:
        with _lock:
            _num_open -= 1
            _put_back(label, _state())


def _put_back(label: str, theirs: dict[str, Any]) -> None:
    global _their_folder
    if _copies and not any(map(_is_open, _copies.values())):
        with suppress(OSError):
            os.write(2, f"error: {label} closed the files of the run's process; fix it\n".encode())
        os._exit(2)
    for stream in set(_copies) - set(theirs["streams"]):
        os.dup2(_copies[stream], stream)
        logger.warning("%s closed standard stream %d: opened again", label, stream)
    if theirs["dtype"] != _ours["dtype"] is not None:
        sys.modules["torch"].set_default_dtype(_ours["dtype"])
        logger.warning("%s changed torch's default dtype: put back", label)
    if not _num_open:
        _their_folder = theirs["folder"] if theirs["folder"] != _ours["folder"] else ""
        with suppress(OSError):  # it has been removed
            os.chdir(_ours["folder"])


def _state() -> dict[str, Any]:
    folder, torch = "", sys.modules.get("torch")
    with suppress(OSError):  # it has been removed
        folder = os.getcwd()
    dtype = None if torch is None else torch.get_default_dtype()
    return {"folder": folder, "dtype": dtype, "streams": [*filter(_is_open, range(3))]}


def _is_open(descriptor: int) -> bool:
    try:
        return bool(os.fstat(descriptor))
    except OSError:
        return False
