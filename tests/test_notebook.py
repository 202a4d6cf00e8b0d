"""The notebook in examples/ runs, cell after cell, and does what its text says."""

import json
import math
from pathlib import Path

import forked
import pytest

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "examples" / "ppo_notebook.ipynb"

# Runs in the notebook's process, after its last cell.
REPORT = """
import json
import dschat.distributed as dist
dist.shutdown()
json.dump(
    {
        "history": history,
        "losses": [actor_loss, critic_loss],
        "reward": reward_metrics,
        "answers": answers,
        "optimizer_steps": engine.version,
        "lengths": [len(ids) for ids in rollout.token_ids],
    },
    open("report.json", "w"),
)
"""


def code_cells() -> list[str]:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_notebook_is_clean():
    """Format 4, no outputs, no execution counts: a diff of it shows changes of the text alone."""
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where the cells have run: a folder of its own, one process, no launcher, no hub."""
    folder = tmp_path_factory.mktemp("notebook")
    script = folder / "cells.py"
    script.write_text("\n\n".join([*code_cells(), REPORT]), encoding="utf-8")
    done = forked.run(str(script), cwd=str(folder), limit_s=240.0)
    assert done.code == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def report(folder) -> dict:
    return json.loads((folder / "report.json").read_text())


@pytest.mark.slow
def test_first_rollout_is_the_references_own(report):
    """Before the first update the actor is the reference: KL 0, and the same log-probs."""
    first, *rest = report["history"]
    assert first["objective/kl"] == pytest.approx(0.0, abs=1e-4)
    assert first["rollout/logprob_gap"] < 1e-4
    assert all(abs(row["objective/kl"]) > 1e-3 for row in rest)


@pytest.mark.slow
def test_training_is_sound(report):
    history = report["history"]
    assert len(history) == 5
    assert report["optimizer_steps"] == 5 * 2 * 2  # iterations x epochs x mini-batches
    assert all(math.isfinite(value) for row in history for value in row.values())
    assert all(math.isfinite(value) for value in report["losses"])
    assert all(row["rollout/sequences"] == 64 for row in history)
    assert all(row["train/bad_steps"] == 0 for row in history)


@pytest.mark.slow
def test_both_models_learn(report):
    """The reward model beats chance clearly, and the policy its own beginning."""
    assert report["reward"]["eval/accuracy"] > 0.6
    scores = [row["objective/scores"] for row in report["history"]]
    assert sum(scores[-2:]) / 2 > scores[0]


@pytest.mark.slow
def test_answers_and_saved_actor(report, folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from dschat.builtin.tiny_model import resolve_model

    assert len(report["answers"]) == 3
    assert all(0 < length <= 16 for length in report["lengths"])
    saved = folder / "output" / "notebook" / "actor"
    model, tokenizer = (c.from_pretrained(saved) for c in (AutoModelForCausalLM, AutoTokenizer))
    assert model.config.vocab_size == len(tokenizer)
    start = AutoModelForCausalLM.from_pretrained(resolve_model("builtin/tiny"))
    moved = (model.lm_head.weight - start.lm_head.weight).abs().max()
    assert moved > 1e-4  # what was saved is what was trained
