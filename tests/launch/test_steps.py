"""Runs of two steps: the policy learns from pairs, or from reward functions."""

from pathlib import Path

import pytest
from stub_steps import DPO, QUIET, finish, plan, planned

from dschat.config import UserError


def test_a_policy_loss_leaves_out_step_three(tree):
    argv = ("--recipe", "quiet", "--loss", "dpo", "--output-dir", "out")
    fields = planned(tree, *argv)
    assert list(fields) == [1, 2]
    # from the SFT model, not from the recipe's base of a reward model, into step 3's folder
    assert fields[2]["model_name_or_path"] == "out/step1_sft"
    assert fields[2]["output_dir"] == "out/step3_rlhf"
    made = plan(tree, *argv)
    assert made.notes == ["step 2 trains the policy itself (--loss dpo): no step 3"]
    assert [run.number for run in made.runs] == [1, 2]
    assert made.runs[1].step.title == "DPO"
    assert made.runs[1].folder == "out/step3_rlhf"
    assert list(planned(tree, *argv, "--step", "2")) == [1, 2]
    finish(Path("out/step1_sft"))
    assert list(planned(tree, *argv, "--step", "2")) == [2]
    finish(Path("out/step3_rlhf"), like=DPO)
    made = plan(tree, *argv)
    assert made.commands == []
    assert made.finished(made.runs[1])
    assert list(planned(tree, *argv, "--step2.overwrite_output_dir")) == [2]


def test_the_policy_starts_from_a_trained_model(tree):
    actor = finish(Path("old/step1_sft"))
    fields = planned(tree, "--actor-model", str(actor), "--loss", "kto")
    assert list(fields) == [2]
    assert fields[2]["model_name_or_path"] == "old/step1_sft"
    fields = planned(tree, "--loss", "ipo", "--step2.model_name_or_path", "hub/sft")
    assert list(fields) == [2]
    assert fields[2]["model_name_or_path"] == "hub/sft"


@pytest.mark.parametrize(("settings", "loss"), [("kl_coef: 0.1", "dpo"), ("loss: dpo", None)])
def test_a_policy_of_the_other_kind_is_not_taken_as_finished(tree, settings, loss):
    """DPO and RLHF both write to step3_rlhf."""
    folder = finish(Path("out/step3_rlhf"))
    finish(Path("out/step1_sft"))
    finish(Path("out/step2_reward"))
    (folder / "training_config.yaml").write_text(settings + "\n")
    argv = [*QUIET, *(["--loss", loss] if loss else [])]
    with pytest.raises(UserError, match=r"--output_dir out has a policy that step \d trained"):
        plan(tree, *argv)
    last = 2 if loss else 3
    assert list(planned(tree, *argv, f"--step{last}.overwrite_output_dir")) == [last]
    (folder / "COMPLETE").unlink()  # nothing of it would be taken
    assert list(planned(tree, *argv)) == [last]


def test_reward_functions_leave_out_step_two(tree):
    argv = ("--actor-model", "hub/actor", "--output-dir", "out", "--reward_fn", "length")
    fields = planned(tree, *argv)
    assert list(fields) == [1, 3]
    assert fields[3]["reward_fn"] == ["length"]
    assert fields[3]["actor_model_name_or_path"] == "out/step1_sft"
    assert not {"critic_model_name_or_path", "reward_model_name_or_path"} & set(fields[3])
    assert "no step 2" in plan(tree, *argv).notes[0]
    assert list(planned(tree, *argv, "--step", "3")) == [1, 3]
    finish(Path("out/step1_sft"))
    assert list(planned(tree, *argv, "--step", "3")) == [3]


def test_a_teacher_alone_leaves_out_step_two(tree):
    argv = ("--actor-model", "hub/actor", "--output-dir", "out")
    argv += ("--teacher_model_name_or_path", "hub/teacher")
    alone = (*argv, "--advantage_estimator", "reinforce")
    assert list(planned(tree, *alone)) == [1, 3]
    assert "no step 2" in plan(tree, *alone).notes[0]
    with pytest.raises(UserError, match="--advantage_estimator reinforce"):
        plan(tree, *argv)
    for reward, steps in (("--reward-model", [1, 2, 3]), ("--critic_model_name_or_path", [1, 3])):
        assert list(planned(tree, *argv, reward, "hub/reward")) == steps


def test_a_reward_model_beside_reward_functions(tree):
    """A named base is trained, and the model is passed to step 3 as a reward source."""
    argv = (*QUIET, "--reward_fn", "length")
    fields = planned(tree, *argv)
    assert list(fields) == [1, 2, 3]
    assert fields[3]["reward_model_name_or_path"] == "out/step2_reward"
    assert "critic_model_name_or_path" not in fields[3]  # step 3 starts it from the reward model
    assert "--step 1 3 leaves it out" in plan(tree, *argv).notes[0]
    assert list(planned(tree, *argv, "--step", "1", "3")) == [1, 3]
    assert list(planned(tree, *argv, "--step", "3", "--reward-model", "hub/r")) == [1, 2, 3]
    taken = planned(tree, *argv, "--reward_model_name_or_path", "hub/rm")
    assert list(taken) == [1, 3]
    assert taken[3]["reward_model_name_or_path"] == "hub/rm"
