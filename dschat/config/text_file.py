"""Reads the text files that flags name."""

import errno
import os
from pathlib import Path


def read_text(path: str | Path) -> str:
    """The text of a UTF-8 file; ``~`` is the home folder.

    Raises:
        OSError: the file cannot be read, or is a pipe or a device, which may block forever.
        UnicodeDecodeError: the file is not UTF-8.
    """
    path = Path(os.path.expanduser(path))  # Path.expanduser raises for ~nobody
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "a pipe or a device, not a file")
    return path.read_text(encoding="utf-8")
