"""For tests of the files on disk: a fake engine that saves as DeepSpeed's do, a run of it, and a
disk that becomes full.
"""

import errno
import io
import os
import sys
from types import SimpleNamespace

import safetensors.torch
import torch
from safetensors import SafetensorError

from dschat.checkpoint import atomic_files
from dschat.checkpoint.manager import CheckpointManager, RunState

FILE = "mp_rank_00_model_states.pt"


class FakeEngine:
    """Its whole state is ``weights``; none of them is a parameter."""

    config = {"zero_optimization": {"stage": 0}}
    param_names = {}
    optimizer = SimpleNamespace(param_groups=[])
    lr_scheduler = SimpleNamespace(base_lrs=[], lr_lambdas=[], last_epoch=0)

    def __init__(self, number: float = 0.0, size: int = 500) -> None:
        self.weights = torch.full((size,), number)
        self.micro_steps = int(abs(number))

    def zero_optimization(self):
        return False

    def save_checkpoint(self, folder, tag, client_state, **_):
        state = client_state | {"w": self.weights, "ds_config": self.config, "module": {}}
        self.checkpoint_engine.save(state, f"{folder}/{tag}/{FILE}")

    def load_checkpoint(self, folder, tag, **_):
        path = f"{folder}/{tag}/{FILE}"
        state = self.checkpoint_engine.load(path)
        self.weights.copy_(state.pop("w"))
        return path, state


def state_at(step: int) -> RunState:
    """Of a run in which everything is ``step``."""
    return RunState(
        {"actor": FakeEngine(step), "critic": FakeEngine(-step)},
        {"ema": {"a.weight": torch.full((7,), float(step)), "b": torch.tensor(step)}},
        {"step": step, "kl": step / 3, "nested": {"best": [None, float("inf")]}},
    )


def save(checkpoints: CheckpointManager, *steps: int) -> None:
    for step in steps:
        checkpoints.save(step, state_at(step))
        checkpoints.wait()


def step_loaded(checkpoints: CheckpointManager, path=None) -> int:
    """The step of the checkpoint that is taken, all of whose state must be of that step."""
    found, state = checkpoints.latest(path), state_at(0)
    values = checkpoints.load(found, state)
    assert state.engines["actor"].weights.eq(found.step).all()
    assert state.engines["critic"].weights.eq(-found.step).all()
    assert state.engines["actor"].micro_steps == found.step
    assert state.tensors["ema"]["a.weight"].eq(found.step).all()
    assert values == state_at(found.step).values
    return values["step"]


def names(folder):
    """What lies in the checkpoints' folder, hidden or not."""
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


FULL = "Error while serializing: I/O error: No space left on device (os error 28)"  # safetensors'


class Disk:
    """Takes ``room`` bytes more of what this process saves; ``refused`` files are partial."""

    def __init__(self, monkeypatch):
        self.room, self.refused, self._serialize = sys.maxsize, 0, safetensors.torch.serialize_file
        monkeypatch.setattr(safetensors.torch, "serialize_file", self.serialize)
        monkeypatch.setattr(atomic_files, "open", self.open, raising=False)

    def takes(self, num_bytes):
        self.room -= num_bytes
        self.refused += self.room < 0
        return self.room >= 0

    def serialize(self, tensors, path, **options):
        self._serialize(tensors, path, **options)
        if not self.takes(os.path.getsize(path)):
            os.truncate(path, 4)
            raise SafetensorError(FULL)

    def open(self, path, mode, **options):
        disk = self

        class File(io.FileIO):
            def write(self, data):
                if not disk.takes(len(data)):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return super().write(data)

        return File(path, mode, **options)
