"""The fixture of the tests of train.py."""

import shutil

import pytest
from python_process import ROOT
from stub_steps import STUB

from dschat.launch import recipe, run_plan


@pytest.fixture
def gpus_here(monkeypatch):
    """``gpus_here(n)``: how many GPUs this machine seems to have; none at first."""
    count = [0]
    monkeypatch.setattr(run_plan, "_num_gpus", lambda: count[0])
    return lambda n: count.__setitem__(0, n)


@pytest.fixture
def tree(tmp_path, monkeypatch, gpus_here):
    """A copy of train.py and the recipes with stub steps; it is the working directory."""
    root = tmp_path / "tree"
    shutil.copytree(ROOT / "training" / "recipes", root / "training" / "recipes")
    shutil.copy(ROOT / "train.py", root)
    (root / "training/recipes/quiet.yaml").write_text(
        "model: {actor_model: hub/actor, reward_model: hub/reward}\ncommon: {seed: 3}\n"
    )
    for step in recipe.STEPS.values():
        (root / step.name).mkdir()
        (root / step.name / "main.py").write_text(STUB)
    monkeypatch.chdir(root)
    return root
