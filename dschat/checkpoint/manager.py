"""Saves and restores the state of a training run: engines, tensors, values, random generators.

A `RunState` is saved after a step and restored in a new run, whose world size may differ.

A checkpoint, ``OUT/<step>/checkpoints/step_000012``::

    actor/*.pt, critic/*.pt      DeepSpeed's files, one or two per rank
    rank_00000.safetensors       that rank's tensors and random generators
    values.json                  counters, positions, statistics: the same on all ranks
    manifest.json                step, settings, every file's size and checksum; written last

All ranks write into one folder, so several machines need a shared disk for the output folder.
State is copied to host memory (its size again, until it is written) and written while training
continues; without enough memory, training waits.
"""

import json
import logging
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

import dschat.distributed as dist
from dschat.checkpoint import async_writer, atomic_files, deepspeed_state, manifest
from dschat.checkpoint.async_writer import Failed, Writing
from dschat.checkpoint.manifest import CheckpointInfo, Damaged
from dschat.config import UserError
from dschat.models.training_engine import TrainingEngine

logger = logging.getLogger("dschat")

_RANDOM = "random"  # the group name of the generators' states
Tensors = dict[str, dict[str, Tensor]]


@dataclass
class RunState:
    """The state after a step that the next step depends on.

    ``engines``: DeepSpeed engines by name. ``tensors``: this rank's, by group and name.
    ``values``: JSON values, the same on all ranks. ``generators``: from
    `async_writer.read_generators`; None: their states when it is saved. ``files``: files outside of
    the checkpoint that ``values`` refer to; they are synced to disk before it is complete.
    """

    engines: dict[str, TrainingEngine] = field(default_factory=dict)
    tensors: Tensors = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    generators: dict[str, Tensor] | None = None
    files: list[Path] = field(default_factory=list)


class CheckpointManager:
    """The checkpoints of one step's output folder. All methods are collective."""

    def __init__(
        self, output_dir: str | Path, settings: Mapping[str, Any], total_limit: int | None = None
    ) -> None:
        """Collective. Removes what killed processes left half-written.

        ``settings``: JSON values that must be equal in a run that resumes; a
        ``seed`` among them seeds ranks that are not in a checkpoint. ``total_limit``: number of
        latest checkpoints to keep; None: all.
        """
        self._folder = Path(output_dir) / manifest.FOLDER
        self._settings = json.loads(json.dumps(settings))
        self._total_limit = total_limit
        self._writing: Writing | None = None
        self._is_logged = False  # whether the result of `_writing` is
        self._damaged: set[Path] = set()
        self._failing = False  # the last one could not be written, which is logged once
        self.last: Path | None = None  # the latest complete one, on rank 0
        hosts = dist.gather_objects(socket.gethostname())
        self._processes_here = hosts.count(socket.gethostname())
        self._tidy()

    def _tidy(self) -> None:
        if dist.is_main_process():
            atomic_files.tidy(self._folder)
        dist.barrier()

    # -- Saving

    def save(self, step: int, state: RunState) -> None:
        """Collective. Save ``state`` after ``step``; returns before the checkpoint is complete, as
        soon as training may continue.

        A failed write (no space, a removed folder) is logged once; older checkpoints stay.
        """
        self.wait()
        self._tidy()
        target = self._folder / manifest.step_name(step)
        problem = _make_folders(atomic_files.staging_of(target), list(state.engines))
        if problem:
            if dist.is_main_process():
                self._warn(problem)
            return
        contents = self._contents(atomic_files.staging_of(target), state)
        in_background = async_writer.fits(async_writer.num_bytes(contents), self._processes_here)
        if in_background:
            contents = async_writer.snapshot(contents)
        else:
            logger.info("too little memory to write in the background: training waits")
        self._writing = Writing(
            target,
            step,
            self._settings,
            dist.rank(),
            dist.world_size(),
            state.files,
            self._total_limit,
        )
        self._is_logged = False
        self._writing.start(contents)
        if not in_background:
            self._writing.files.exception()  # waits

    def _contents(self, staging: Path, state: RunState) -> dict[str, Any]:
        """Collective. What this rank writes, by path in the checkpoint."""
        assert _RANDOM not in state.tensors, f"{_RANDOM} is a reserved name"
        contents: dict[str, Any] = {}
        for name, engine in state.engines.items():
            contents |= deepspeed_state.capture(engine, staging, name)
        generators = (
            async_writer.read_generators() if state.generators is None else state.generators
        )
        groups = state.tensors | {_RANDOM: generators}
        contents[_rank_file(dist.rank())] = {
            f"{group}/{name}": tensor
            for group, tensors in groups.items()
            for name, tensor in tensors.items()
        }
        if dist.is_main_process():
            contents[manifest.VALUES] = json.dumps(state.values).encode()
        return contents

    def wait(self) -> None:
        """Collective. Wait until the current write is complete or has failed."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        problems = dist.gather_objects(writing.problem())
        failures = [f"process {rank}: {p}" for rank, p in enumerate(problems) if p]
        self._log_result(writing, failures[0] if failures else "")
        dist.barrier()

    def poll(self) -> None:
        """Log the result of the current write, if it has one. Call it after every step."""
        if self._writing is not None and self._writing.checkpoint.done():
            self._log_result(self._writing)

    def _log_result(self, writing: Writing, problem: str = "") -> None:
        """Wait for the result; on rank 0, log it once and remember the checkpoint."""
        try:
            checkpoint = writing.wait(problem)
        except Failed as failure:
            if not self._is_logged:
                self._warn(str(failure))
        else:
            if checkpoint is not None and not self._is_logged:
                if self._failing:
                    logger.warning("checkpoints are written again")
                self._failing, self.last = False, checkpoint.folder
                size_gib = checkpoint.num_bytes / 2**30
                logger.info("checkpoint %s (%.2f GiB)", checkpoint.folder, size_gib)
        self._is_logged = True

    def _warn(self, problem: str) -> None:
        logger.log(
            logging.DEBUG if self._failing else logging.WARNING,
            "a checkpoint could not be written (%s); training continues; latest checkpoint: %s",
            problem,
            self.last or "none yet",
        )
        self._failing = True

    # -- Resuming

    def latest(self, path: str | Path | None = None) -> CheckpointInfo | None:
        """Collective. The latest complete checkpoint, or the one in ``path``, with verified
        checksums; None without any.

        A damaged checkpoint is logged as a warning, and the one before it is tried.

        Raises:
            UserError: all checkpoints are damaged, or the one in ``path`` is.
        """
        if path is None:
            (folders, *_) = dist.gather_objects(list(manifest.step_folders(self._folder)))
        else:
            folders = [Path(path)]
        problem = ""
        for folder in folders:
            checkpoint, problem = verified(folder)
            if checkpoint is not None:
                self.last = folder
                return checkpoint
            if path is not None:
                raise UserError(
                    f"--resume {path}: {problem}; name a folder such as "
                    f"{self._folder / manifest.step_name(100)}, or use --resume latest"
                )
            self._damaged.add(folder)
            logger.warning(
                "the checkpoint %s is damaged: %s; trying the one before", folder, problem
            )
        if folders:
            raise UserError(
                f"--resume latest: no checkpoint in {self._folder} is complete ({problem}); "
                "restore one, or restart with --overwrite_output_dir (train.py: --restart)"
            )
        return None

    def load(self, checkpoint: CheckpointInfo, state: RunState) -> dict[str, Any]:
        """Collective. `load` of this run, once nothing is being written."""
        self.wait()
        return load(checkpoint, state, self._settings.get("seed", 0))

    def remove_later(self, checkpoint: CheckpointInfo) -> None:
        """Collective. Remove checkpoints after the resumed one, before the files that they refer to
        are truncated. Damaged ones stay until the next one is complete.
        """
        if dist.is_main_process():
            for folder, step in manifest.step_folders(self._folder).items():
                if step > checkpoint.step and folder not in self._damaged:
                    atomic_files.remove(folder)
        dist.barrier()


def load(checkpoint: CheckpointInfo, state: RunState, seed: int) -> dict[str, Any]:
    """Collective. Restore new engines, and in place ``state.tensors``; returns the values.
    ``checkpoint``: a verified one. ``seed``: of ranks that it does not have.

    With another world size a tensor counts as this rank's equal part of a flat tensor, padded at
    the end, and is partitioned again to its length in ``state``.

    Raises:
        UserError: a part of ``state`` is not in the checkpoint, or cannot be converted.
    """
    values = json.loads((checkpoint.folder / manifest.VALUES).read_bytes())
    _check_holds(checkpoint, values, state)
    for name, engine in state.engines.items():
        deepspeed_state.restore(engine, checkpoint.folder, name, checkpoint.world_size)
    for group, tensors in state.tensors.items():
        for name, tensor in tensors.items():
            restore_tensor(checkpoint, f"{group}/{name}", tensor, dist.rank(), dist.world_size())
    if dist.rank() < checkpoint.world_size:
        async_writer.write_generators(read_tensors(checkpoint, dist.rank(), _RANDOM))
    else:
        async_writer.seed_generators(seed, dist.rank(), checkpoint.step)
    return values


def _check_holds(checkpoint: CheckpointInfo, values: dict[str, Any], state: RunState) -> None:
    """``UserError`` where the checkpoint lacks an engine, tensors or a value of ``state``."""
    folders = {name.partition("/")[0] for name in checkpoint.files if "/" in name}
    with safe_open(checkpoint.folder / _rank_file(0), "pt") as file:
        groups = {name.partition("/")[0] for name in file.keys()}  # noqa: SIM118  no mapping
    wanted = {group for group, tensors in state.tensors.items() if tensors}
    missing = sorted((state.engines.keys() - folders) | (wanted - groups))
    if missing := missing + [name for name in state.values if name not in values]:
        raise UserError(
            f"--resume {checkpoint.folder}: it has no {' and no '.join(missing)}; resume with the "
            "settings and the version of dschat that it was saved with, or restart with "
            "--overwrite_output_dir (train.py: --restart)"
        )


def _make_folders(staging: Path, names: list[str]) -> str:
    """Collective. Make the folders of a checkpoint, before any rank writes into them; returns the
    reason where that fails on a rank.
    """
    problem = ""
    try:
        for name in names:
            (staging / name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"{error.strerror}: {error.filename}"
    return next(filter(None, dist.gather_objects(problem)), "")


def verified(folder: Path) -> tuple[CheckpointInfo | None, str]:
    """Collective. The checkpoint in ``folder``, or the reason why it is damaged; each rank verifies
    its share of the files.
    """
    checkpoint, problem = None, ""
    try:
        checkpoint = manifest.read_manifest(folder)
        manifest.check_sizes(checkpoint)
        manifest.check_checksums(
            checkpoint, sorted(checkpoint.files)[dist.rank() :: dist.world_size()]
        )
    except Damaged as error:
        problem = str(error)
    problems = [p for p in dist.gather_objects(problem) if p]
    return (None, problems[0]) if problems else (checkpoint, "")


def _rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def read_tensors(checkpoint: CheckpointInfo, rank: int, group: str) -> dict[str, Tensor]:
    """The tensors of ``group`` that ``rank`` saved, by name; on the CPU.

    No communication: any rank reads any other's.
    """
    start = f"{group}/"
    with safe_open(checkpoint.folder / _rank_file(rank), "pt") as file:
        names = [name for name in file.keys() if name.startswith(start)]  # noqa: SIM118
        return {name.removeprefix(start): file.get_tensor(name) for name in names}


def restore_tensor(
    checkpoint: CheckpointInfo, name: str, tensor: Tensor, rank: int, world_size: int
) -> None:
    """Fill ``tensor``, of ``rank`` among ``world_size``, from ``name`` in the checkpoint: its equal
    part where the checkpoint is of another world size. No communication.
    """

    def saved_by(rank: int) -> Tensor:
        with safe_open(checkpoint.folder / _rank_file(rank), "pt") as file:
            return file.get_tensor(name)

    if checkpoint.world_size == world_size:
        saved = saved_by(rank)
        assert saved.shape == tensor.shape, f"{name}: {saved.shape}, not {tensor.shape}"
        tensor.detach().copy_(saved)
        return
    whole = torch.cat([saved_by(other).reshape(-1) for other in range(checkpoint.world_size)])
    part = whole[rank * tensor.numel() :][: tensor.numel()]
    padded = torch.nn.functional.pad(part, (0, tensor.numel() - part.numel()))
    tensor.detach().copy_(padded.view(tensor.shape))
