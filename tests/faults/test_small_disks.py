"""A disk that is too small for a run: one line, and the run resumes once there is more space."""

import os
import re

import pytest
from cases import GRPO, STEP1
from orphans import train_py
from runs import Case, check_same, finish, mount, num_bytes, ran, weights

pytestmark = pytest.mark.slow


def test_a_disk_without_space(whole, models, small_disk):
    """It holds one checkpoint and what the step saves, not more."""
    finished = whole(STEP1)
    size = num_bytes(finished / "checkpoints/step_000006")
    last = num_bytes(finished) - num_bytes(finished / "checkpoints")
    disk = small_disk(last + int(1.5 * size))
    said = ran(STEP1, models, disk / "run")
    assert said.count("could not be written (No space left on device") == 1, said
    check_same(disk / "run", finished)


@pytest.mark.parametrize(
    "case",
    [
        STEP1,
        Case(2),
        Case(3, GRPO),
        pytest.param(Case(3, "--kl_coef 0.1 --actor_zero_stage 3", 2), marks=pytest.mark.dist),
    ],
    ids=lambda case: case.name,
)
def test_a_disk_without_space_for_the_model(case, whole, models, small_disk):
    """The checkpoint has taken it: that is named, whole, and resumed from when there is space."""
    finished = whole(case)
    taken = num_bytes(finished / "checkpoints/step_000004")
    saved = [path for path in weights(finished) if "actor" in path or case.step < 3]
    disk = small_disk(taken + (finished / saved[0]).stat().st_size // 2)
    said = ran(case, models, disk / "run", code=2 if case.ranks == 1 else 1)
    line = next(line for line in said.splitlines() if line.startswith("error: "))
    assert re.search(
        rf"{disk}/run(/actor)? has no space for the model: [1-9]\.\d MiB needed"
        rf"(, \d\.\d MiB free)?; free some, then resume from {disk}/run/checkpoints/step_000002 ",
        line,
    ), said
    assert case.ranks > 1 or "Traceback" not in said  # torchrun shows one of its own
    assert not list((disk / "run").rglob("model*.safetensors"))
    assert mount(disk, 4 * num_bytes(finished), "remount,")
    ran(case, models, disk / "run")
    check_same(disk / "run", finished)


@pytest.mark.parametrize(
    "case",
    [STEP1, Case(2), Case(3, "--kl_coef 0.1", 2), Case(1, "--zero_stage 3", 2)],
    ids=lambda case: case.name,
)
@pytest.mark.dist
def test_a_disk_too_small_for_the_model_is_refused_before_training(case, models, small_disk):
    disk = small_disk(2**20)
    said = ran(case, models, disk / "run", code=2 if case.ranks == 1 else 1)
    assert re.search(
        r"^error: --output_dir \S+ has no space for the model: [1-9]\.\d MiB", said, re.M
    )
    assert said.count("error: ") == 1
    assert os.listdir(disk) == ["run.log"]


def test_train_py_on_a_full_disk(models, tmp_path, small_disk):
    whole, log = tmp_path / "whole", tmp_path / "log"
    command = [*train_py(models, whole), "--save_total_limit", "1"]
    assert finish(command, log) == 0, log.read_text()[-3000:]
    size = num_bytes(whole / "step1_sft/checkpoints")
    disk = small_disk(size + 2**20)  # of one checkpoint, and half a model
    command = [*train_py(models, disk / "out"), "--save_total_limit", "1"]
    assert finish(command, log) == 2
    line = log.read_text().splitlines()[-1]
    assert re.search("no space for the model: .* resume from .*/checkpoints/step_0000", line), line
    assert mount(disk, 10 * size, "remount,")
    assert finish(command, log) == 0, log.read_text()[-3000:]
    assert "resumes from" in log.read_text()
    check_same(disk / "out/step1_sft", whole / "step1_sft")
