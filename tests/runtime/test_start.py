"""Ranks that start a step with other settings, files or rows refuse each other."""

import re

import forked
import pytest
from python_process import python
from quick import slow

import dschat.distributed as dist
from dschat.config import SFTConfig, UserError
from dschat.data.batches import check_same_rows
from dschat.distributed import process_group
from dschat.runtime.start import start_step, warn_of_few_steps


@pytest.fixture
def other(monkeypatch):
    """Makes another rank give ``values`` where this one gives its own, once for each."""

    def gives(*values):
        given = iter(values)
        monkeypatch.setattr(process_group, "gather_objects", lambda mine: [mine, next(given)])

    return gives


def settings_at(folder, monkeypatch, **changed):
    """What `start_step` compares, on a machine whose files are in ``folder``."""
    seen = []
    with monkeypatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(dist, "check_same", seen.append)
        given = {"data_path": ["rows.jsonl"], "chat_template": "chat.jinja", "output_dir": "out"}
        start_step(SFTConfig(**given | changed))
    return seen[0]


@pytest.mark.parametrize(
    ("file", "changed", "named"),
    [
        ("rows.jsonl", {}, "content of --data_path"),
        ("chat.jinja", {}, "content of --chat_template"),
        (None, {"learning_rate": 1e-3}, "--learning_rate than process 0 (0.001, where process 0"),
    ],
)
def test_machines_with_other_settings_or_files(file, changed, named, tmp_path, monkeypatch, other):
    """The same command with a --config or data on each machine's own disk."""
    for node in ("a", "b"):
        (tmp_path / node).mkdir()
        for name in ("rows.jsonl", "chat.jinja"):
            (tmp_path / node / name).write_text(node if name == file else "same")
    here = settings_at(tmp_path / "a", monkeypatch)
    other(here)
    dist.check_same(here)
    other(settings_at(tmp_path / "b", monkeypatch, **changed))
    with pytest.raises(UserError, match=re.escape(named)):
        dist.check_same(here)


@pytest.mark.parametrize("theirs", [[1, 2, 3], [1, 2, 3, 5], [0, 2, 3, 4]], ids=str)
def test_ranks_with_other_rows(theirs, monkeypatch, other):
    seen = []
    with monkeypatch.context() as patch:
        patch.setattr(dist, "check_same", seen.append)
        check_same_rows([1, 2, 3, 4], theirs)
    ours, others = seen
    other(ours)
    check_same_rows([1, 2, 3, 4])
    other(others)
    with pytest.raises(UserError, match=f"another set of rows .*{len(theirs)} rows, digest"):
        check_same_rows([1, 2, 3, 4])


def test_a_run_too_small_to_learn_anything_says_so(caplog):
    for steps, max_steps in ((1, 0), (19, 0), (20, 0), (1, 1)):  # asked for one: no word
        config = SFTConfig(max_steps=max_steps, per_device_train_batch_size=8)
        warn_of_few_steps(config, steps, "per_device_train_batch_size")
    one, many = caplog.messages
    assert "optimizer steps in all: 1; " in one
    assert "optimizer steps in all: 19; " in many
    assert one.endswith("raise --num_train_epochs (1) or lower --per_device_train_batch_size (8)")


IN_A_NOTEBOOK = """
import os, sys
sys.stderr = os.fdopen(os.dup(2), "w")
import torch
import dschat.distributed as dist
from dschat.builtin.tiny_model import resolve_model
from dschat.models.checkpoint import Checkpoint
from dschat.models.lora import add_lora
from dschat.runtime.deepspeed_engine import start_deepspeed
start_deepspeed()
model = Checkpoint(resolve_model("builtin/tiny"), "--model", False).language_model(torch.float32)
add_lora(model, 2, 0, ["q_proj"], True, "--lora_dim")
dist.shutdown()
"""


@pytest.mark.parametrize("is_new", [False, *slow([True])])
def test_libraries_are_silent_in_a_notebook(is_new):
    """There `sys.stderr` has a descriptor of its own, and nobody has set up the console. A new
    process imports all of them, too.
    """
    if is_new:
        done = python("-c", IN_A_NOTEBOOK)
        assert done.returncode == 0, done.stderr
    else:
        done = forked.run("-c", IN_A_NOTEBOOK)
        assert done.code == 0, done.stderr
    assert not done.stdout
    assert not done.stderr
