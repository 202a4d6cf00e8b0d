"""The user's own advantage estimator and policy loss: as dschat's own, and refused if they do not
fit.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from documentation import PAGES, ROOT, blocks
from program_cases import trainer_of
from python_process import environment, python
from step_rows import PROMPTS

from dschat.checkpoint.compatibility import contents_of
from dschat.config import RLHFConfig, UserError
from dschat.losses import group_stats
from dschat.rlhf.formulas import estimator, policy_loss

FILE = """
import torch
from dschat import losses


def of_groups(scores, group_ids, stats):
    return losses.rloo_advantages(scores, group_ids, stats)


def clipped(logprobs, old_logprobs, advantages, answer_mask, cliprange, *, weights=None):
    assert cliprange == (0.2, 0.2)
    return losses.ppo_loss(
        logprobs, old_logprobs, advantages, answer_mask, cliprange, weights=weights
    )


def few(scores):
    return scores


def one(scores, group_ids, stats):
    return scores.mean()


def broken(scores, group_ids, stats):
    return scores.ratio


def without_weights(logprobs, old_logprobs, advantages, answer_mask, cliprange):
    return logprobs.sum(), {}


def mean_alone(logprobs, old_logprobs, advantages, answer_mask, cliprange, weights):
    return (logprobs * advantages).mean()


def without_gradient(logprobs, old_logprobs, advantages, answer_mask, cliprange, weights):
    return logprobs.detach().sum(), {}
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FILE)


@pytest.mark.slow
def test_an_iteration_by_functions_of_a_file(mine, models_folder):
    def trained(estimator, loss):
        trainer = trainer_of(
            models_folder,
            advantage_estimator=estimator,
            policy_loss=loss,
            num_samples_per_prompt=4,
            ppo_epochs=2,
            actor_learning_rate=1e-3,
        )
        experience = trainer.generate_experience(PROMPTS[:4])
        trainer.train_rlhf(experience)
        return experience, trainer.metrics

    (here, metrics), (theirs, known) = (
        trained("mine.py:of_groups", "mine.py:clipped"),
        trained("rloo", "ppo"),
    )
    assert torch.equal(here.advantages, theirs.advantages)
    assert here.advantages.abs().sum() > 0
    for name in ("loss/policy_avg", "policy/approxkl_avg", "policy/grad_norm", "val/ratio"):
        assert metrics[name] == known[name]


@pytest.mark.parametrize(
    ("find", "name", "words"),
    [
        (estimator, "few", r"a function of \(scores, group_ids, stats\)$"),
        (estimator, "one", r"must return a tensor of shape \[4\]; see grpo_advantages"),
        (estimator, "broken", "raised AttributeError: .*; fix it$"),
        (estimator, "absent", "not found: mine.py has no absent"),
        (policy_loss, "without_weights", r"\(logprobs, .*, answer_mask, cliprange, weights\)$"),
        (
            policy_loss,
            "mean_alone",
            r"must return a tensor of shape \[\] with a gradient and a dict; ",
        ),
        (policy_loss, "without_gradient", "must return a tensor .* with a gradient"),
    ],
)
def test_what_does_not_fit_is_refused(mine, find, name, words):
    flag = "policy_loss" if find is policy_loss else "advantage_estimator"
    with pytest.raises(UserError, match=f"^--{flag} mine.py:{name} .*{words}"):
        find(f"mine.py:{name}")


def test_those_of_the_documentation_fit(mine, tmp_path):
    (code,) = (block for block in blocks(PAGES["algorithms.md"], "python") if "estimate" in block)
    (tmp_path / "shown.py").write_text(code)
    scores, groups = torch.tensor([1.0, 3.0, 5.0, 5.0]), torch.tensor([0, 0, 1, 1])
    estimate, _ = estimator("shown.py:estimate")
    assert estimate(scores, groups, group_stats(scores, groups, 2)).tolist() == [-1, 1, 0, 0]
    policy_loss("shown.py:loss")


def test_they_leave_the_run_as_it_was(mine, tmp_path):
    (tmp_path / "moves.py").write_text(
        "import os, torch\ndef estimate(scores, group_ids, stats):\n"
        "    os.chdir('/')\n    torch.set_default_dtype(torch.float64)\n    return scores * 1.0\n"
    )
    estimate, _ = estimator("moves.py:estimate")
    scores, groups = torch.tensor([1.0, 3.0]), torch.tensor([0, 0])
    assert estimate(scores, groups, group_stats(scores, groups, 1)).tolist() == [1, 3]
    assert (Path.cwd(), torch.get_default_dtype()) == (tmp_path, torch.float32)


def test_a_resumed_run_must_have_the_same_file(mine, tmp_path):
    config = RLHFConfig(advantage_estimator="mine.py:of_groups", policy_loss="mine.py:clipped")
    before = contents_of(config)
    assert before.keys() == {"advantage_estimator", "policy_loss"}
    (tmp_path / "mine.py").write_text(FILE + "# changed\n")
    assert contents_of(config).keys() == before.keys()
    assert not before.items() & contents_of(config).items()
    assert contents_of(RLHFConfig()) == {}


@pytest.mark.slow
def test_the_diff_of_the_documentation_adds_both(models_folder, tmp_path):
    (diff,) = blocks((ROOT / "CONTRIBUTING.md").read_text(), "diff")
    shutil.copytree(ROOT / "dschat", tmp_path / "dschat")
    subprocess.run(["git", "apply", "-"], input=diff, text=True, cwd=tmp_path, check=True)
    code = f"""
from pathlib import Path
from program_cases import trainer_of
from step_rows import PROMPTS
import dschat
trainer = trainer_of(Path({str(models_folder)!r}), advantage_estimator="mean_baseline",
                     policy_loss="ratio", num_samples_per_prompt=2, actor_learning_rate=1e-3)
e = trainer.generate_experience(PROMPTS[:4])
trainer.train_rlhf(e)
score, mean = e.scores[:1], e.scores.mean()
assert (e.advantages[:1, 0] - (score - mean)).abs() < 1e-6, (e.advantages, e.scores)
print(dschat.__file__, trainer.engine.version > 0, trainer.metrics["policy/grad_norm"] > 0)
"""
    path = os.pathsep.join(map(str, (tmp_path, ROOT / "tests", ROOT / "tests/dist")))
    found = python("-c", code, cwd=tmp_path, env=environment(PYTHONPATH=path))
    assert found.stdout.split()[-3:] == [str(tmp_path / "dschat/__init__.py"), "True", "True"], (
        found
    )
