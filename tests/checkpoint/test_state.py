"""A checkpoint holds the state of its step, and restores it."""

import random
import threading

import numpy as np
import pytest
import torch
from fakes import FakeEngine, state_at, step_loaded

from dschat.checkpoint import async_writer, atomic_files
from dschat.checkpoint.manager import CheckpointManager, RunState, read_tensors, restore_tensor
from dschat.checkpoint.manifest import CheckpointInfo
from dschat.config import UserError


def test_training_continues_while_it_is_written(tmp_path, monkeypatch):
    gate, write, state = threading.Event(), atomic_files.write_file, state_at(3)

    def waiting(path, content):
        gate.wait(10)
        return write(path, content)

    monkeypatch.setattr(atomic_files, "write_file", waiting)
    checkpoints = CheckpointManager(tmp_path, {})
    checkpoints.save(3, state)
    state.engines["actor"].weights.zero_()  # the next step
    state.tensors["ema"]["a.weight"].zero_()
    state.values["nested"]["best"].append(1)
    torch.rand(3)
    gate.set()
    checkpoints.wait()
    assert step_loaded(checkpoints) == 3


def test_without_the_memory_for_a_copy_training_waits(tmp_path, container, caplog):
    caplog.set_level("INFO", "dschat")
    container(1000)
    checkpoints, state = CheckpointManager(tmp_path, {}), state_at(3)
    checkpoints.save(3, state)
    state.engines["actor"].weights.zero_()
    checkpoints.wait()
    assert "training waits" in caplog.text
    assert step_loaded(checkpoints) == 3


@pytest.mark.parametrize(("then", "now"), [(1, 2), (2, 1), (3, 2), (2, 2)])
def test_tensors_are_repartitioned(then, now, tmp_path):
    """A flat tensor of ten, padded at the end, in ``then`` equal parts."""
    whole = torch.arange(1.0, 11.0)
    folder = tmp_path / "step_000001"

    def part(rank, count):
        size = -(-10 // count)
        mine = whole[rank * size :][:size]
        return torch.nn.functional.pad(mine, (0, size - len(mine)))

    for rank in range(then):
        groups = {"ema/w": part(rank, then), "pending/x": torch.tensor([rank])}
        atomic_files.write_file(folder / f"rank_{rank:05d}.safetensors", groups)
    found = CheckpointInfo(folder, 1, then, {}, {})
    for rank in range(now):
        tensor = torch.full_like(part(rank, now), -1)
        restore_tensor(found, "ema/w", tensor, rank, now)
        assert tensor.tolist() == part(rank, now).tolist()
    others = [read_tensors(found, rank, "pending")["x"].item() for rank in range(then)]
    assert others == list(range(then))


def test_what_a_checkpoint_does_not_hold(tmp_path):
    checkpoints = CheckpointManager(tmp_path, {})
    checkpoints.save(1, RunState({"actor": FakeEngine()}))
    checkpoints.wait()
    lacks = r"step_000001: it has no critic and no ema and no step and .*; .*--overwrite"
    with pytest.raises(UserError, match=lacks):
        checkpoints.load(checkpoints.latest(), state_at(1))


def test_a_snapshot_fits_if_all_processes_of_the_host_may_take_one(container):
    container(100)  # a quarter stays free
    assert [async_writer.fits(*case) for case in ((75, 1), (76, 1), (25, 3), (26, 3))] == [
        1,
        0,
        1,
        0,
    ]


def test_processes_that_a_checkpoint_does_not_know_draw_their_own_numbers():
    before, drawn = async_writer.read_generators(), []
    for seed, rank, step in ((1, 0, 5), (2, 0, 5), (1, 1, 5), (1, 0, 6), (1, 0, 5)):
        async_writer.seed_generators(seed, rank, step)
        drawn.append((random.random(), np.random.rand(), float(torch.rand(()))))
    async_writer.write_generators(before)
    assert drawn[0] == drawn[4]
    for of_one_generator in zip(*drawn[:4], strict=True):
        assert len(set(of_one_generator)) == 4
