"""Records preferences as rows that step 2 trains on."""

import json
import os
from pathlib import Path

from dschat.config import UserError
from dschat.serving.schema import Preference


class PreferenceFile:
    """A JSONL file with the columns ``prompt`` (turns), ``chosen`` and ``rejected`` (text), and the
    names of the models.

    Raises:
        UserError: the file cannot be written.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab"):
                pass
        except OSError as error:
            raise UserError(f"--preferences {path}: {error.strerror}; name another file") from None
        if not self.path.stat().st_size:
            self.path.unlink()  # a file without rows is no data set

    def append(self, preference: Preference) -> None:
        """Add a row, at once and whole."""
        turns = [message.as_dict() for message in preference.messages]
        row = {
            "prompt": turns,
            "chosen": [{"role": "assistant", "content": preference.chosen}],
            "rejected": [{"role": "assistant", "content": preference.rejected}],
            "chosen_model": preference.chosen_model,
            "rejected_model": preference.rejected_model,
        }
        line = json.dumps(row, ensure_ascii=False).encode() + b"\n"
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, line)
            os.fsync(file)
        finally:
            os.close(file)
