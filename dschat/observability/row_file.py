"""Appends JSON rows to a file that a resumed run truncates to its checkpoint's position.

If the disk is full, rows wait in memory and in checkpoints until they can be written.
"""

import json
import logging
import os
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from dschat.startup.files import no_link

logger = logging.getLogger("dschat")


class RowFile:
    """One JSON object per line of ``path``.

    With ``keeps_rows`` the rows of an earlier run stay until `resume_from` or `begin` drops them.
    """

    def __init__(self, path: Path, keeps_rows: bool) -> None:
        self.path = path
        mode = "ab" if keeps_rows else "wb"
        self._file = FileIO(path, mode, opener=no_link)
        self._initial_size = self._end = os.fstat(self._file.fileno()).st_size
        self._unwritten = b""
        self._failing = False  # the last write failed; logged once

    def position(self) -> dict[str, Any]:
        """The size of the file in bytes, and the rows not yet written after it."""
        self._write_out()
        return {"bytes": self._end, "rows": self._unwritten.decode()}

    def resume_from(self, position: Mapping[str, Any], step: int) -> None:
        """Drop rows after ``position``, the one saved in the checkpoint of ``step``.

        A file that is shorter than that is logged as a warning, and keeps its whole rows.
        """
        size = position["bytes"]
        if size > self._initial_size:
            size = self.path.read_bytes().rfind(b"\n", 0, self._initial_size) + 1
            logger.warning("%s lacks rows of the first %d steps: they are lost", self.path, step)
        self._truncate(size, position["rows"].encode())

    def begin(self) -> None:
        """Drop the rows of an earlier run, when there is no checkpoint to resume from."""
        if self._initial_size:
            new_rows = self.path.read_bytes()[self._initial_size :]
            self._truncate(0, new_rows + self._unwritten)

    def _truncate(self, size: int, unwritten: bytes) -> None:
        """Cut the file to ``size`` bytes, then write ``unwritten``."""
        self._file.truncate(size)
        self._file.seek(size)
        self._end, self._unwritten = size, unwritten
        self._write_out()

    def write(self, row: Mapping[str, Any]) -> None:
        """Append ``row``. JSON has no NaN and infinity: they become null."""
        text = json.dumps(row)
        if "NaN" in text or "Infinity" in text:
            text = json.dumps(json.loads(text, parse_constant=lambda _: None))
        self._unwritten += (text + "\n").encode()
        self._write_out()

    def _write_out(self) -> None:
        try:
            while self._unwritten:
                written = self._file.write(self._unwritten)
                self._end, self._unwritten = self._end + written, self._unwritten[written:]
        except OSError as error:
            if not self._failing:
                logger.warning(
                    "%s cannot be written (%s); training continues, rows wait in memory",
                    self.path,
                    error.strerror,
                )
            self._failing = True
            return
        if self._failing:
            logger.warning("%s is writable again", self.path)
        self._failing = False

    def close(self) -> None:
        self._write_out()
        self._file.close()
