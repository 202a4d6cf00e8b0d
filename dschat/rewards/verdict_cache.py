"""Caches verdicts by the content of their request, in memory and in a folder of JSON lines.

Every process appends to a file of its own, and reads all files at its start: processes of several
hosts may share the folder. A line that a killed process left half written is skipped.
"""

import json
import logging
import os
import socket
import threading
import uuid
from pathlib import Path
from typing import TextIO

from dschat.config.errors import require

logger = logging.getLogger("dschat")


class VerdictCache:
    """Verdicts by key.

    Args:
        folder: created with the first verdict. "": in memory only.
        flag: of the folder, for messages.

    Raises:
        UserError: the folder cannot be written.
    """

    def __init__(self, folder: str, flag: str) -> None:
        self._folder = Path(os.path.expanduser(folder)) if folder else None
        self._known: dict[str, float] | None = None
        self._file: TextIO | None = None
        self._lock = threading.Lock()
        if self._folder:
            there = next(p for p in (self._folder, *self._folder.absolute().parents) if p.exists())
            require(
                there.is_dir() and os.access(there, os.W_OK),
                f"{flag}={folder} cannot be written; name another folder, or none: {flag}=",
            )

    def get(self, key: str) -> float | None:
        """The verdict; None if it is not known."""
        with self._lock:
            if self._known is None:
                self._known = self._read()
            return self._known.get(key)

    def add(self, key: str, verdict: float, reply: str) -> None:
        """Keep a verdict, and on disk the reply that it was read from."""
        with self._lock:
            assert self._known is not None, "get precedes add"
            self._known[key] = verdict
            if self._folder is None:
                return
            line = json.dumps({"key": key, "verdict": verdict, "reply": reply})
            try:
                self._write(self._folder, line)
            except OSError as error:  # a full disk need not stop a run
                logger.warning("%s: %s; verdicts stay in memory", self._folder, error.strerror)
                self._folder = None

    def _write(self, folder: Path, line: str) -> None:
        if self._file is None:
            folder.mkdir(parents=True, exist_ok=True)
            name = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}.jsonl"
            self._file = (folder / name).open("a", encoding="utf-8")
        self._file.write(line + "\n")
        self._file.flush()

    def _read(self) -> dict[str, float]:
        known: dict[str, float] = {}
        for path in sorted(self._folder.glob("*.jsonl")) if self._folder else ():
            with path.open(encoding="utf-8", errors="replace") as lines:
                for line in lines:
                    try:
                        content = json.loads(line)
                        known[content["key"]] = float(content["verdict"])
                    except (ValueError, KeyError, TypeError):
                        continue
        return known
