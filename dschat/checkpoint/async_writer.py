"""Writes a checkpoint in the background: every rank its own files, rank 0 the manifest.

Training continues from a copy of its state in host memory. Ranks communicate through files only, so
that training waits for no rank: a rank that has written its files leaves ``.done_00001.json`` in
the staging folder, with their sizes and checksums. Rank 0 waits for all of these, writes the
manifest and renames the folder.
"""

import copy
import json
import logging
import random
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import dschat.distributed as dist
from dschat.checkpoint import atomic_files, manifest
from dschat.checkpoint.manifest import CheckpointInfo, Damaged
from dschat.config import UserError
from dschat.distributed.memory import available_memory
from dschat.startup.files import replace_file
from dschat.user_code.calls import settle

logger = logging.getLogger("dschat")

# Fraction of the free memory that a snapshot leaves unused.
_LEFT_FREE = 0.25


def snapshot(state: Any) -> Any:
    """``state`` with every tensor copied to host memory, and every other object copied.

    A tensor under several names (tied weights) is copied once, a view without the rest of its
    storage.
    """
    seen: dict[tuple, Tensor] = {}

    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)  # NOTE: loss scalers change in place
        key = _identity(value)
        if key not in seen:
            seen[key] = value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        return seen[key]

    return tree_map(copied, state)


def _identity(tensor: Tensor) -> tuple:
    return (
        *(tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset()),
        *(tensor.dtype, tensor.shape, tensor.stride()),
    )


def num_bytes(state: Any) -> int:
    """Bytes that `snapshot` allocates."""
    tensors = (leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor))
    return sum({_identity(tensor): tensor.nbytes for tensor in tensors}.values())


def fits(size: int, processes_here: int) -> bool:
    """Whether each of ``processes_here`` processes can copy ``size`` bytes into host memory."""
    return size * processes_here <= (1 - _LEFT_FREE) * available_memory()


# -- random generators -----------------------------------------------------------------------------


def read_generators() -> dict[str, Tensor]:
    """States of this process's global generators, on CUDA also of its device's. Sampling of answers
    uses none of them.
    """
    version, words, gauss = random.getstate()
    numpy_state = np.random.get_state()
    assert isinstance(numpy_state, tuple), "unknown generator"
    kind, key, position, has_gauss, cached = numpy_state
    assert (version, kind) == (3, "MT19937"), "unknown generator"
    tensors = {
        "python": torch.tensor(words, dtype=torch.int64),  # (625,)
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.tensor([*key.tolist(), position, has_gauss], dtype=torch.int64),  # (626,)
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if dist.device().type == "cuda":
        tensors["cuda"] = torch.cuda.get_rng_state(dist.device())
    return tensors


def write_generators(tensors: Mapping[str, Tensor]) -> None:
    """Restore the states from `read_generators`."""
    gauss = tensors["python_gauss"].tolist()
    random.setstate((3, tuple(tensors["python"].tolist()), gauss[0] if gauss else None))
    *key, position, has_gauss = tensors["numpy"].tolist()
    words = np.array(key, dtype=np.uint32)
    np.random.set_state(
        ("MT19937", words, position, has_gauss, float(tensors["numpy_gauss"].item()))
    )
    torch.set_rng_state(tensors["torch"])
    if "cuda" in tensors and dist.device().type == "cuda":
        torch.cuda.set_rng_state(tensors["cuda"], dist.device())


def seed_generators(seed: int, rank: int, step: int) -> None:
    """Seed the generators of a rank that is not in the checkpoint of ``step``."""
    sequence = np.random.SeedSequence([seed % 2**64, rank, step])
    first, second, third = sequence.generate_state(3, np.uint32).tolist()
    random.seed(first)
    np.random.seed(second)
    torch.manual_seed(third)  # the generators of all devices too


SHOWS_UP_S = 90.0  # for a written file to become visible on another machine
_POLL_S = 0.05


class Failed(Exception):
    """A checkpoint could not be written: a full disk, a removed folder."""


@dataclass
class Writing:
    """A checkpoint that is being written.

    Attributes:
        target: its folder.
        others: files outside of it that rank 0 syncs to disk before it is complete.
        total_limit: number of checkpoints to keep then, with it; None: all.
        files: this rank's files -> (size, checksum), once they are written. Fails with an OSError,
            or with a bug.
        checkpoint: on rank 0 the complete checkpoint; None on other ranks. Fails with `Failed`.
    """

    target: Path
    step: int
    settings: Mapping[str, Any]
    rank: int
    world_size: int
    others: Sequence[Path] = ()
    total_limit: int | None = None
    files: Future[dict[str, tuple[int, str]]] = field(init=False, default_factory=Future)
    checkpoint: Future[CheckpointInfo | None] = field(init=False, default_factory=Future)

    def __post_init__(self) -> None:
        self._staging = atomic_files.staging_of(self.target)
        self._problem = ""  # of any rank, once `give_up` was called
        self._give_up = threading.Event()
        self._deadline = float("inf")

    def start(self, contents: Mapping[str, Any]) -> None:
        """Write ``contents``: path below the folder -> argument of `atomic_files.write_file`.

        NOTE: in a daemon thread: a run that ends without `wait` loses this checkpoint.
        """
        work = threading.Thread(target=self._run, args=(contents,), name="checkpoint", daemon=True)
        work.start()

    def problem(self) -> str:
        """Wait for this rank's files; returns why they could not be written, or "". Raises a bug of
        the thread.
        """
        try:
            self.files.result()
        except OSError as error:
            return _reason(error)
        return ""

    def wait(self, problem: str) -> CheckpointInfo | None:
        """Wait for ``checkpoint``; all ranks' files are written, or one has this ``problem``.

        Raises:
            Failed: it could not be written.
        """
        if problem:
            self._problem = problem
            self._give_up.set()
        self._deadline = time.monotonic() + SHOWS_UP_S
        return self.checkpoint.result()

    def _run(self, contents: Mapping[str, Any]) -> None:
        settle(self.files, self._write_files, contents)
        settle(self.checkpoint, self._complete)

    def _write_files(self, contents: Mapping[str, Any]) -> dict[str, tuple[int, str]]:
        written: dict[str, tuple[int, str]] = {}
        try:
            for name, content in contents.items():
                written[name] = atomic_files.write_file(self._staging / name, content)
            replace_file(self._staging / f".done_{self.rank:05d}.json", json.dumps(written))
        except OSError as error:
            self._drop(list(contents), _reason(error))
            raise
        return written

    def _drop(self, names: list[str], problem: str) -> None:
        """Delete this rank's files, and tell rank 0 that it failed."""
        try:
            for name in names:
                (self._staging / name).unlink(missing_ok=True)
            replace_file(self._staging / f".failed_{self.rank:05d}.json", json.dumps(problem))
        except OSError:
            logger.debug("process %d cannot write that it failed", self.rank)

    def _complete(self) -> CheckpointInfo | None:
        """Rank 0: complete the checkpoint from all ranks' files, or remove it."""
        if self.rank:
            return None
        try:
            if problem := self.problem():
                raise Failed(problem)
            written = self._gathered()
            written |= atomic_files.unclaimed(self._staging, written)
            for path in self._staging.glob(".done_*"):
                path.unlink()
            for path in self.others:
                atomic_files.sync_file(path)
            text = manifest.manifest_bytes(self.step, self.world_size, self.settings, written)
            atomic_files.write_file(self._staging / manifest.MANIFEST, text)
            atomic_files.sync_folders(self._staging)
            # Files may have been deleted meanwhile.
            manifest.check_sizes(manifest.read_manifest(self._staging))
            atomic_files.move_in(self._staging, self.target)
            checkpoint = manifest.read_manifest(self.target)
        except (OSError, Failed, Damaged) as error:
            shutil.rmtree(self._staging, ignore_errors=True)
            raise Failed(_reason(error)) from error
        self._prune()
        return checkpoint

    def _prune(self) -> None:
        """Remove checkpoints beyond the limit, and checkpoints of later steps (damaged ones)."""
        try:
            folders = manifest.step_folders(self.target.parent)
        except UserError:  # the disk has gone: the next checkpoint fails, and says so
            return
        older = [folder for folder, step in folders.items() if step < self.step]
        later = [folder for folder, step in folders.items() if step > self.step]
        beyond = [] if self.total_limit is None else older[max(0, self.total_limit - 1) :]
        for folder in later + beyond:
            atomic_files.remove(folder)

    def _gathered(self) -> dict[str, tuple[int, str]]:
        """The files of all ranks; waits for them."""
        written: dict[str, tuple[int, str]] = {}
        waiting = set(range(self.world_size))
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
                raise Failed(self._problem)
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
