"""Keeps the last rollouts of a run on disk, and reads them back: ``--keep_rollouts``.

``OUT/step3_rlhf/rollouts/iteration_000120.rank0.safetensors`` has what the learner reads in
iteration 120: this rank's tensors of the experience, and its random generators; the rest is JSON in
the header. A file is complete or absent.
"""

import json
import logging
import os
import re
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

import dschat.distributed as dist
from dschat.checkpoint.async_writer import read_generators
from dschat.checkpoint.atomic_files import save_tensors
from dschat.config import UserError
from dschat.rlhf.experience import Experience
from dschat.rlhf.trainer import DeepSpeedPPOTrainer
from dschat.startup.files import discard, sync_file

logger = logging.getLogger("dschat")

_NAME = re.compile(r"\.?iteration_(\d{6,})\.rank\d+\.safetensors")  # . while it is written
_RANDOM = "random/"  # starts the names of generators
Facts = dict[str, Any]  # of a file's header


class KeptRollouts:
    """The rollouts in a step's output folder. ``limit``: number of the last ones to keep."""

    def __init__(self, output_dir: str | Path, limit: int = 0) -> None:
        self._folder, self._limit = Path(output_dir) / "rollouts", limit

    def begin(self, trainer: DeepSpeedPPOTrainer) -> None:
        """Collective. Remove rollouts of iterations that ``trainer`` repeats."""
        for path, iteration in self._files().items() if dist.is_main_process() else ():
            if iteration > trainer.iteration or path.name.startswith("."):
                discard(path)
        dist.barrier()

    def keep(self, trainer: DeepSpeedPPOTrainer, e: Experience) -> None:
        """Write the experience that ``trainer`` trains on next. After a failure none is kept."""
        if not self._limit:
            return
        tensors = {name: value for name, value in vars(e).items() if isinstance(value, Tensor)}
        tensors |= {_RANDOM + name: state for name, state in read_generators().items()}
        if e.experts:
            tensors["experts"] = torch.cat(e.experts)
        # Some share memory, which safetensors refuses.
        tensors = {n: t.clone(memory_format=torch.contiguous_format) for n, t in tensors.items()}
        facts = {
            "world_size": dist.world_size(),
            "num_iters": trainer.engine.num_iters,
            "token_budget": trainer.engine.token_budget,
            "kl_coef": trainer.kl.value,
            "metrics": {name: float(value) for name, value in trainer.metrics.items()},
            "experience": {n: v for n, v in vars(e).items() if isinstance(v, (int, str))},
            "settings": asdict(trainer.args),
            "has_reward_functions": trainer.args.has_reward_functions,
        }
        facts["digest"] = _digest(tensors, facts)
        path = self._path(trainer.iteration + 1)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_name(f".{path.name}")
            save_tensors(tensors, unfinished, facts=json.dumps(facts))
            sync_file(unfinished)
            os.replace(unfinished, path)
            for other, iteration in self._files().items() if dist.is_main_process() else ():
                if iteration <= trainer.iteration + 1 - self._limit:
                    discard(other)
        except (OSError, SafetensorError) as error:
            logger.warning("%s: %s; no more rollouts are kept", path, error)
            self._limit = 0

    def read(self, iteration: int) -> tuple[Experience, dict[str, Tensor], Facts]:
        """This rank's experience, generators and header; ``UserError`` where its file is missing or
        damaged.
        """
        path = self._path(iteration)
        try:
            with safe_open(path, "pt") as file:
                facts = json.loads(file.metadata()["facts"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if facts.pop("digest") != _digest(tensors, facts):
                raise ValueError("another checksum")
            if "experts" in tensors:
                tensors["experts"] = list(tensors["experts"].split(tensors["lengths"].tolist()))
            generators = {n: tensors.pop(n) for n in [*tensors] if n.startswith(_RANDOM)}
            e = Experience(**tensors, **facts["experience"])
        except FileNotFoundError:
            known = sorted(set(self._files().values()))
            kept = f"iterations {known[0]} to {known[-1]} are kept" if known else "none is kept"
            raise UserError(
                f"{path} is missing; {kept}: name another --iteration, or train with a larger "
                "--keep_rollouts"
            ) from None
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path} is damaged, or of another version of dschat ({error}); restore it, or "
                "name another --iteration"
            ) from None
        return e, {n.removeprefix(_RANDOM): t for n, t in generators.items()}, facts

    def _path(self, iteration: int) -> Path:
        """This rank's file; iterations count from 1, as in metrics.jsonl."""
        return self._folder / f"iteration_{iteration:06d}.rank{dist.rank()}.safetensors"

    def _files(self) -> dict[Path, int]:
        """Files of all ranks, also unfinished ones, and their iterations."""
        paths = self._folder.iterdir() if self._folder.is_dir() else ()
        named = {path: _NAME.fullmatch(path.name) for path in paths}
        return {path: int(match[1]) for path, match in named.items() if match}


def _digest(tensors: dict[str, Tensor], facts: Facts) -> str:
    digest = blake2b(json.dumps(facts).encode())
    for _, tensor in sorted(tensors.items()):
        digest.update(tensor.numpy().data)
    return digest.hexdigest()
