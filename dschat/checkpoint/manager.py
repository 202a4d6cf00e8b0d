"""Everything a run needs to go on, saved and put back: engines, tensors, values, generators.

A `RunState` comes in, at a step's boundary; a folder that is whole or absent goes out, and the same
state again in another process, with as many processes or others. It must not know which step
trains, nor what values and tensors mean.

A checkpoint, ``OUT/<step>/checkpoints/step_000012``::

    actor/*.pt, critic/*.pt      DeepSpeed's own, one or two for each process
    rank_00000.safetensors       that process's tensors and random generators
    values.json                  counters, positions, statistics: the same on all processes
    manifest.json                step, settings, every file's size and checksum; written last

All processes write into one folder, so with several machines the output folder is on a disk that
they share. State is copied to host memory at the boundary (its size again, until it is written) and
written while training goes on; without the memory for that, training waits.
"""

import json
import logging
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

import dschat.distributed as dist
from dschat.checkpoint import atomic_files, deepspeed_state, rng_state, snapshot
from dschat.checkpoint.async_writer import Writing
from dschat.checkpoint.manifest import (
    FOLDER,
    Damaged,
    Found,
    check_checksums,
    check_sizes,
    read_manifest,
    step_folders,
    step_name,
)
from dschat.config import UserError
from dschat.models.training_engine import TrainingEngine

logger = logging.getLogger("dschat")

_VALUES = "values.json"
_RANDOM = "random"  # the generators' group of tensors
Tensors = dict[str, dict[str, Tensor]]


@dataclass
class RunState:
    """What a step's loop holds that the next one depends on.

    ``engines``: DeepSpeed engines by name. ``tensors``: this process's own, by group and name.
    ``values``: what JSON can say, the same on all processes. ``generators``: from
    `randoms.read_generators`; None: as they are when it is saved. ``files``: those outside of the
    checkpoint that ``values`` speak of; they are on disk before it is.
    """

    engines: dict[str, TrainingEngine] = field(default_factory=dict)
    tensors: Tensors = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    generators: dict[str, Tensor] | None = None
    files: list[Path] = field(default_factory=list)


class CheckpointManager:
    """The checkpoints of one step's output folder. Every method is collective unless it says so."""

    def __init__(
        self, output_dir: str | Path, settings: Mapping[str, Any], total_limit: int | None = None
    ) -> None:
        """Collective. Clear away what a killed process left half-written.

        ``settings``: what JSON can say of the run and must be equal to go on (`changed_settings`);
        a ``seed`` among them seeds processes that a checkpoint does not know. ``total_limit``: how
        many to keep, the newest; None: all.
        """
        self._folder = Path(output_dir) / FOLDER
        self._settings = json.loads(json.dumps(settings))
        self._total_limit = total_limit
        self._writing: Writing | None = None
        self._damaged: set[Path] = set()
        self._failing = False  # the last one could not be written, which is said once
        self.last: Path | None = None  # the newest that is known to be whole; on the main process
        hosts = dist.gather_objects(socket.gethostname())
        self._processes_here = hosts.count(socket.gethostname())
        self._tidy()

    def _tidy(self) -> None:
        if dist.is_main_process():
            atomic_files.tidy(self._folder)
        dist.barrier()

    def clear(self) -> None:
        """Collective. Remove every checkpoint: a new run begins in an old one's folder."""
        if dist.is_main_process():
            for folder in step_folders(self._folder):
                atomic_files.remove(folder)
        self.last = None
        dist.barrier()

    # -- Saving

    def save(self, step: int, state: RunState) -> None:
        """Collective. Save ``state``, of the boundary after ``step``; returns when training may go
        on, which is before the checkpoint is whole.

        What cannot be written (no space, a folder removed) is said once in the log; the older
        checkpoints stay.
        """
        self.wait()
        self._tidy()
        target = self._folder / step_name(step)
        problem = _made(atomic_files.staging_of(target), list(state.engines))
        if problem:
            if dist.is_main_process():
                self._finished(None, problem)
            return
        contents = self._contents(atomic_files.staging_of(target), state)
        in_background = snapshot.fits(snapshot.num_bytes(contents), self._processes_here)
        if in_background:
            contents = snapshot.snapshot(contents)
        else:
            logger.info("too little memory to write in the background: training waits")
        self._writing = Writing(
            target,
            step,
            self._settings,
            dist.rank(),
            dist.world_size(),
            self._finished,
            state.files,
        )
        self._writing.start(contents, in_background)

    def _contents(self, staging: Path, state: RunState) -> dict[str, Any]:
        """Collective. What this process writes, by path in the checkpoint."""
        assert _RANDOM not in state.tensors, f"{_RANDOM} is a name of ours"
        contents: dict[str, Any] = {}
        for name, engine in state.engines.items():
            contents |= deepspeed_state.capture(engine, staging, name)
        generators = rng_state.read_generators() if state.generators is None else state.generators
        groups = state.tensors | {_RANDOM: generators}
        contents[_rank_file(dist.rank())] = {
            f"{group}/{name}": tensor
            for group, tensors in groups.items()
            for name, tensor in tensors.items()
        }
        if dist.is_main_process():
            contents[_VALUES] = json.dumps(state.values).encode()
        return contents

    def wait(self) -> None:
        """Collective. Until what is being written is whole, or has failed."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        writing.join_own()
        problems = dist.gather_objects(writing.problem)
        named = [f"process {rank}: {p}" for rank, p in enumerate(problems) if p]
        writing.join(named[0] if named else "")
        dist.barrier()

    def _finished(self, found: Found | None, problem: str) -> None:
        """On the main process, from the writing thread."""
        if found is None:
            stays = f"{self.last} stays the last one" if self.last else "there is none yet"
            logger.log(
                logging.DEBUG if self._failing else logging.WARNING,
                "a checkpoint could not be written (%s); training goes on, %s",
                problem,
                stays,
            )
            self._failing = True
            return
        if self._failing:
            logger.warning("checkpoints are written again")
        self._failing, self.last = False, found.folder
        logger.info("checkpoint %s (%.2f GiB)", found.folder, found.num_bytes / 2**30)
        self._prune(found)

    def _prune(self, newest: Found) -> None:
        """Remove what is too many, and what is damaged."""
        older = []
        for folder, step in step_folders(self._folder).items():
            if step < newest.step:
                older.append(folder)
            elif step > newest.step:
                atomic_files.remove(folder)
        if self._total_limit is not None:
            for folder in older[max(0, self._total_limit - 1) :]:
                atomic_files.remove(folder)

    # -- Going on

    def latest(self, path: str | Path | None = None) -> Found | None:
        """Collective. The newest whole checkpoint, its checksums verified; None without any.

        A damaged one is named in a warning, and the one before it is taken.

        Raises:
            UserError: none of those that there are is whole; or ``path`` is not, which was asked
                for.
        """
        if path is not None:
            found, problem = _verified(Path(path))
            if found is None:
                raise UserError(
                    f"--resume {path}: {problem}; name a folder such as "
                    f"{self._folder / step_name(100)}, or say --resume latest"
                )
            return self._taken(found)
        (folders, *_) = dist.gather_objects(list(step_folders(self._folder)))
        problem = ""
        for folder in folders:
            found, problem = _verified(folder)
            if found is not None:
                return self._taken(found)
            self._damaged.add(folder)
            logger.warning(
                "the checkpoint %s is damaged: %s; trying the one before", folder, problem
            )
        if folders:
            raise UserError(
                f"--resume latest: no checkpoint in {self._folder} is whole ({problem}); put one "
                "back, or begin anew with --overwrite_output_dir (train.py: --restart)"
            )
        return None

    def _taken(self, found: Found) -> Found:
        self.last = found.folder
        return found

    def load(self, found: Found, state: RunState) -> dict[str, Any]:
        """Collective. Put everything back, into new engines and in place into ``state.tensors``;
        returns the values. ``found``: from `latest`, which has verified it.

        With another number of processes than the checkpoint was written by, a tensor is taken for
        this process's equal part of a flat one, padded at the end, and cut anew to the length that
        it has in ``state``; other tensors are the caller's to read, with `read_tensors`.

        Raises:
            UserError: something of ``state`` is not in the checkpoint, or cannot be converted.
        """
        self.wait()
        self._check_holds(found, state)
        for name, engine in state.engines.items():
            deepspeed_state.restore(engine, found.folder, name, found.world_size)
        for group, tensors in state.tensors.items():
            for name, tensor in tensors.items():
                _put_back(found, f"{group}/{name}", tensor)
        if dist.rank() < found.world_size:
            rng_state.write_generators(read_tensors(found, dist.rank(), _RANDOM))
        else:
            rng_state.seed_generators(self._settings.get("seed", 0), dist.rank(), found.step)
        return json.loads((found.folder / _VALUES).read_bytes())

    def remove_later(self, found: Found) -> None:
        """Collective. The run is taken up at ``found``: later checkpoints go, before anything that
        they speak of is cut back. Damaged ones stay until the next one is whole.
        """
        if dist.is_main_process():
            for folder, step in step_folders(self._folder).items():
                if step > found.step and folder not in self._damaged:
                    atomic_files.remove(folder)
        dist.barrier()

    def _check_holds(self, found: Found, state: RunState) -> None:
        folders = {name.partition("/")[0] for name in found.files if "/" in name}
        with safe_open(found.folder / _rank_file(0), "pt") as file:
            groups = {name.partition("/")[0] for name in file.keys()}  # noqa: SIM118  no mapping
        wanted = {group for group, tensors in state.tensors.items() if tensors}
        missing = sorted((state.engines.keys() - folders) | (wanted - groups))
        if missing:
            raise UserError(
                f"--resume {found.folder}: it holds no {' and no '.join(missing)}; go on with the "
                "settings it was made with, or begin anew with --restart"
            )


def _made(staging: Path, names: list[str]) -> str:
    """Collective. Make the folders of a checkpoint, before anybody writes into them: what stands in
    the way on any process.
    """
    problem = ""
    try:
        for name in names:
            (staging / name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"{error.strerror}: {error.filename}"
    return next(filter(None, dist.gather_objects(problem)), "")


def _verified(folder: Path) -> tuple[Found | None, str]:
    """Collective. The checkpoint in ``folder``, or what is wrong with it; each process reads its
    share of the files.
    """
    found, problem = None, ""
    try:
        found = read_manifest(folder)
        check_sizes(found)
        check_checksums(found, sorted(found.files)[dist.rank() :: dist.world_size()])
    except Damaged as error:
        problem = str(error)
    problems = [p for p in dist.gather_objects(problem) if p]
    return (None, problems[0]) if problems else (found, "")


def _rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def read_tensors(found: Found, rank: int, group: str) -> dict[str, Tensor]:
    """The tensors of ``group`` that process ``rank`` of the checkpoint saved, by name; on the CPU.
    No communication: any process reads any other's.
    """
    start = f"{group}/"
    with safe_open(found.folder / _rank_file(rank), "pt") as file:
        names = [name for name in file.keys() if name.startswith(start)]  # noqa: SIM118
        return {name.removeprefix(start): file.get_tensor(name) for name in names}


def _put_back(found: Found, name: str, tensor: Tensor) -> None:
    """Fill ``tensor`` with what was saved under ``name``, cut anew where ranks are others."""
    if found.world_size == dist.world_size():
        with safe_open(found.folder / _rank_file(dist.rank()), "pt") as file:
            saved = file.get_tensor(name)
        assert saved.shape == tensor.shape, f"{name}: {saved.shape}, not {tensor.shape}"
        tensor.detach().copy_(saved)
        return
    whole = torch.cat([part.reshape(-1) for part in _parts(found, name)])
    mine = whole[dist.rank() * tensor.numel() :][: tensor.numel()]
    padded = torch.nn.functional.pad(mine, (0, tensor.numel() - mine.numel()))
    tensor.detach().copy_(padded.view(tensor.shape))


def _parts(found: Found, name: str) -> Iterator[Tensor]:
    for rank in range(found.world_size):
        with safe_open(found.folder / _rank_file(rank), "pt") as file:
            yield file.get_tensor(name)
