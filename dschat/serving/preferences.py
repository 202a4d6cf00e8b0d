"""Records preferences as rows that step 2 trains on."""

import errno
import json
import os
from pathlib import Path

from dschat.config import UserError
from dschat.serving.schema import Preference, turns_of


class PreferenceFile:
    """A JSONL file with the columns ``prompt`` (turns), ``chosen`` and ``rejected`` (text), and the
    names of the models.

    Raises:
        UserError: the file cannot be written.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        parent = next(folder for folder in self.path.absolute().parents if folder.exists())
        problem = None
        if self.path.is_symlink():
            problem = errno.ELOOP
        elif self.path.is_dir():
            problem = errno.EISDIR
        elif not parent.is_dir():
            problem = errno.ENOTDIR
        elif not os.access(self.path if self.path.exists() else parent, os.W_OK):
            problem = errno.EACCES
        if problem is not None:
            raise UserError(f"--preferences {path}: {os.strerror(problem)}; name another file")

    def append(self, preference: Preference) -> None:
        """Add a row, at once and whole."""
        row = {
            "prompt": turns_of(preference.messages),
            "chosen": [{"role": "assistant", "content": preference.chosen}],
            "rejected": [{"role": "assistant", "content": preference.rejected}],
            "chosen_model": preference.chosen_model,
            "rejected_model": preference.rejected_model,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps(row, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            os.write(file, line)
            os.fsync(file)
        finally:
            os.close(file)
