"""Reads the text files that flags name."""

import errno
import os
from pathlib import Path


def read_text(path: str | Path) -> str:
    """The text of a file in UTF-8; ``~`` is the home folder.

    Raises:
        OSError: it cannot be read, or is a pipe or a device, whose end may never come.
        UnicodeDecodeError: it is not UTF-8.
    """
    path = Path(os.path.expanduser(path))  # Path.expanduser raises for ~nobody
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "a pipe or a device, not a file")
    return path.read_text(encoding="utf-8")
