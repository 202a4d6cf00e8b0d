"""Writes a checkpoint in the background: every rank its own files, rank 0 the manifest.

Ranks communicate through files only, so that training waits for no rank: a rank that has written
its files leaves ``.done_00001.json`` in the staging folder, with their sizes and checksums. Rank 0
waits for all of these, writes the manifest and renames the folder.
"""

import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dschat.checkpoint import atomic_files
from dschat.checkpoint.manifest import (
    MANIFEST,
    CheckpointInfo,
    Damaged,
    check_sizes,
    manifest_bytes,
    read_manifest,
)

logger = logging.getLogger("dschat")

SHOWS_UP_S = 90.0  # for a written file to become visible on another machine
_POLL_S = 0.05


class Failed(Exception):
    """A checkpoint could not be written: a full disk, a removed folder."""


class Writing:
    """A checkpoint that is being written.

    ``problem``: why this rank's files could not be written, once `join_own` has returned.
    """

    def __init__(
        self,
        target: Path,
        step: int,
        settings: Mapping[str, Any],
        rank: int,
        world_size: int,
        finished: Callable[[CheckpointInfo | None, str], None],
        others: Sequence[Path] = (),
    ) -> None:
        """``finished(checkpoint, problem)`` is called once on rank 0, when the checkpoint is
        complete or has failed; perhaps from another thread. ``others``: files outside of it that
        rank 0 syncs to disk before it is complete.
        """
        self.step = step
        self.problem = ""
        self._target, self._staging = target, atomic_files.staging_of(target)
        self._settings = settings
        self._rank, self._world_size = rank, world_size
        self._finished = finished
        self._others = others
        self._bug: BaseException | None = None
        self._own = threading.Event()
        self._give_up = threading.Event()
        self._deadline = float("inf")
        self._thread: threading.Thread | None = None

    def start(self, contents: Mapping[str, Any], in_background: bool) -> None:
        """Write ``contents``: path below the folder -> argument of `atomic_files.write_file`."""
        if not in_background:
            self._write_own(contents)
        self._thread = threading.Thread(
            target=self._run,
            args=(contents if in_background else None,),
            name="checkpoint",
            daemon=True,  # a run that ends without `join` loses this checkpoint
        )
        self._thread.start()

    def join_own(self) -> None:
        """Wait until this rank's files are written or have failed. Raises for a bug."""
        self._own.wait()
        if self._bug is not None:
            raise self._bug

    def join(self, problem: str) -> None:
        """Wait for the manifest; all ranks' files are written, or one has this ``problem``."""
        if problem:
            self.problem = self.problem or problem
            self._give_up.set()
        self._deadline = time.monotonic() + SHOWS_UP_S
        assert self._thread is not None
        self._thread.join()
        if self._bug is not None:
            raise self._bug

    def _run(self, contents: Mapping[str, Any] | None) -> None:
        if contents is not None:
            self._write_own(contents)
        del contents
        if self._rank == 0 and self._bug is None:
            try:
                self._finish()
            except BaseException as error:  # raised again by `join`, in the thread that trains
                self._bug = error

    def _write_own(self, contents: Mapping[str, Any]) -> None:
        written: dict[str, tuple[int, str]] = {}
        try:
            self._staging.mkdir(parents=True, exist_ok=True)
            for name, content in contents.items():
                written[name] = atomic_files.write_file(self._staging / name, content)
            self._write_note(f".done_{self._rank:05d}.json", json.dumps(written))
        except OSError as error:
            self.problem = _reason(error)
            self._drop(list(contents))
        except BaseException as error:  # raised again by `join_own`, in the thread that trains
            self._bug = error
        finally:
            self._own.set()

    def _drop(self, names: list[str]) -> None:
        """Delete this rank's files, and tell rank 0 that it failed."""
        try:
            for name in names:
                (self._staging / name).unlink(missing_ok=True)
            self._write_note(f".failed_{self._rank:05d}.json", json.dumps(self.problem))
        except OSError:
            logger.debug("process %d cannot write that it failed", self._rank)

    def _write_note(self, name: str, text: str) -> None:
        """Write a file that is complete or absent."""
        path = self._staging / f"{name}.new"
        path.write_text(text, encoding="utf-8")
        os.rename(path, self._staging / name)

    def _finish(self) -> None:
        """Rank 0: complete the checkpoint from all ranks' files, or remove it."""
        try:
            if self.problem:
                raise Failed(self.problem)
            written = self._gathered()
            written |= atomic_files.unclaimed(self._staging, written)
            for path in self._staging.glob(".done_*"):
                path.unlink()
            for path in self._others:
                atomic_files.sync_file(path)
            text = manifest_bytes(self.step, self._world_size, self._settings, written)
            atomic_files.write_file(self._staging / MANIFEST, text)
            atomic_files.sync_folders(self._staging)
            check_sizes(read_manifest(self._staging))  # files may have been deleted meanwhile
            atomic_files.move_in(self._staging, self._target)
            checkpoint = read_manifest(self._target)
        except (OSError, Failed, Damaged) as error:
            self.problem = self.problem or _reason(error)
            shutil.rmtree(self._staging, ignore_errors=True)
            self._finished(None, self.problem)
        else:
            self._finished(checkpoint, "")

    def _gathered(self) -> dict[str, tuple[int, str]]:
        """The files of all ranks; waits for them."""
        written: dict[str, tuple[int, str]] = {}
        waiting = set(range(self._world_size))
        while waiting:
            if not self._staging.exists():
                raise Failed(f"{self._staging} was removed")
            for rank in sorted(waiting):
                failed = self._staging / f".failed_{rank:05d}.json"
                if failed.exists():
                    raise Failed(f"process {rank}: {json.loads(failed.read_text())}")
                done = self._staging / f".done_{rank:05d}.json"
                if done.exists():
                    entries = json.loads(done.read_text())
                    written |= {name: (size, sha) for name, (size, sha) in entries.items()}
                    waiting.discard(rank)
            if self._give_up.wait(_POLL_S if waiting else 0):
                raise Failed(self.problem)
            if waiting and time.monotonic() > self._deadline:
                raise Failed(
                    f"the files of process {min(waiting)} do not show up in {self._staging.parent};"
                    " all processes must write to one shared disk"
                )
        return written


def _reason(error: Exception) -> str:
    """``No space left on device: FILE``."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}" + (f": {error.filename}" if error.filename else "")
    return str(error)
