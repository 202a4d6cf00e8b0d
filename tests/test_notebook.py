"""The notebooks in examples/ run, cell after cell, and do what their texts say."""

import json
import math
import re
from pathlib import Path

import forked
import pytest

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))

# Runs in the notebook's process, after its last cell; %s: what to report.
REPORT = """
import json
import dschat.distributed as dist
dist.shutdown()
json.dump(%s, open("report.json", "w"))
"""
OF_PPO = """{
    "history": history,
    "losses": [actor_loss, critic_loss],
    "reward": reward_metrics,
    "answers": answers,
    "optimizer_steps": engine.version,
    "lengths": [len(ids) for ids in rollout.token_ids],
}"""


def run(name: str, report: str, folder: Path) -> dict:
    """What ``report`` is after the cells have run in ``folder``: one process, no launcher, no
    hub.
    """
    cells = json.loads((ROOT / "examples" / name).read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    script = folder / "cells.py"
    script.write_text("\n\n".join([*code, REPORT % report]), encoding="utf-8")
    done = forked.run(str(script), cwd=str(folder), limit_s=240.0)
    assert done.code == 0, done.stderr[-3000:]
    return json.loads((folder / "report.json").read_text())


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_clean(path):
    """Format 4, no outputs, no execution counts: a diff of it shows changes of the text alone."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("notebook")


@pytest.fixture(scope="module")
def report(folder) -> dict:
    return run("ppo_notebook.ipynb", OF_PPO, folder)


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


@pytest.mark.slow
def test_grpo_on_own_data_learns(tmp_path):
    report = run("grpo_notebook.ipynb", '{"history": history, "answers": answers}', tmp_path)
    scores = [row["eval/score"] for row in report["history"] if "eval/score" in row]
    assert len(scores) == 3
    assert scores[-1] == max(scores) > scores[0]
    assert report["answers"] == ["Your lamp is on its way.", "Your bike is on its way."]


@pytest.mark.slow
def test_a_look_into_a_rollout(tmp_path):
    """Each action is one box; the reward rises; a group's advantages add up to zero."""
    names = '"gap": float(gap), "actions": int(mask.sum()), "likely": later.html'
    sums = '"sums": first_action.view(2, 8).sum(1).tolist(), "boxes": advantages.html'
    score = '"score": trainer.metrics["objective/scores"]'
    report = run("rollout_notebook.ipynb", f"{{{names}, {sums}, {score}}}", tmp_path)
    assert report["gap"] < 1e-4
    assert report["boxes"].count("<span") == report["actions"]
    assert report["sums"] == pytest.approx([0.0, 0.0], abs=1e-5)
    assert report["score"] > 0.3
    hues, likely = ([*map(int, re.findall(r"hsl\((\d+)", report[n]))] for n in ("boxes", "likely"))
    assert min(hues) < 60 < max(hues)  # 60: an advantage of 0
    assert sum(hue > 100 for hue in likely) > len(likely) / 4
