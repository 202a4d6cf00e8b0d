"""Recipes and flags: the fields that reach each step, and errors that name file and key."""

from pathlib import Path

import pytest
from stub_steps import plan, planned, world_of

from dschat.config import UserError


def test_flags_reach_the_steps_that_have_them(tree):
    fields = planned(
        tree, "--recipe=quiet", "--data-path", "x", "y", "--lora-alpha=8", "--kl_ctl", "0.2",
        "--step2.seed", "9", "--max_seq_len", "64", "--no-whiten-advantages",
    )  # fmt: skip
    assert [fields[n]["data_path"] for n in (1, 2, 3)] == [["x", "y"]] * 3
    assert [fields[n]["lora_alpha"] for n in (1, 2, 3)] == [8.0] * 3
    assert [fields[n]["seed"] for n in (1, 2, 3)] == [3, 9, 3]
    assert [fields[n].get("max_seq_len") for n in (1, 2, 3)] == [64, 64, None]
    assert [fields[n].get("kl_coef") for n in (1, 2, 3)] == [None, None, 0.2]
    assert fields[3]["whiten_advantages"] is False


@pytest.mark.parametrize("flag", [["--push-to-hub", "me/x"], ["--push_to_hub=me/x"]])
def test_each_step_has_a_repository_of_its_own(tree, flag):
    fields = planned(tree, "--recipe=quiet", *flag)
    repositories = [fields[n]["push_to_hub"] for n in (1, 2, 3)]
    assert repositories == ["me/x-step1_sft", "me/x-step2_reward", "me/x-step3_rlhf"]
    fields = planned(tree, "--recipe=quiet", "--step3.push_to_hub", "me/x")
    assert [fields[n].get("push_to_hub") for n in (1, 2, 3)] == [None, None, "me/x"]


@pytest.mark.parametrize(
    ("flag", "takers"),
    [
        ("--keep_best", (1, 2, 3)),
        ("--keep_best eval/pass@1", (3,)),
        ("--keep-best=eval/score", (3,)),
        ("--keep_best eval/loss", (1, 2)),
        ("--step2.keep_best eval/accuracy", (2,)),
        ("--step3.keep_best", (3,)),
        ("--step3.keep_best eval/loss", (3,)),  # which refuses it
    ],
)
def test_the_best_model_by_a_metric_that_the_step_has(tree, flag, takers):
    fields = planned(tree, "--recipe=quiet", *flag.split())
    assert tuple(n for n in (1, 2, 3) if "keep_best" in fields[n]) == takers


def test_recipe_file_placeholder_and_launch(tree):
    Path("mine.yaml").write_text(
        "model: {actor_model: hub/a}\nstep2: {model_name_or_path: '{step1}'}\n"
        "step3: {learning: 1}\n"
    )
    with pytest.raises(UserError, match=r"mine\.yaml: step3: unknown key learning"):
        plan(tree, "--recipe", "mine.yaml")
    Path("mine.yaml").write_text(
        "model: {actor_model: hub/a}\nstep2: {model_name_or_path: '{step1}'}\n"
        "launch: {num_gpus: 2}\n"
    )
    made = plan(tree, "--recipe", "mine.yaml", "--step", "2")
    assert [run.number for run, _ in made.commands] == [1, 2]
    assert (
        planned(tree, "--recipe", "mine.yaml")[2]["model_name_or_path"] == "output/mine/step1_sft"
    )
    assert world_of(made.commands[0][1]) == {"node0": [0, 1]}


@pytest.mark.parametrize(
    ("flags", "beta"),
    [("", 1.0), ("kto", 1.0), ("ipo", None), ("ipo --step2.beta 0.3", 0.3)],
)
def test_a_recipes_beta_is_not_on_the_scale_of_ipo(tree, flags, beta):
    loss = f"--step2.loss {flags}".split() if flags else []
    assert planned(tree, "--recipe", "demo-dpo", *loss)[2].get("beta") == beta


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("comon: {}", "unknown key comon; did you mean common?"),
        ("model: {actor: x}", "model: unknown key actor"),
        ("model: {lora_dim: 8}", "model: unknown key lora_dim"),
        ("common: {leraning_rate: 1}", "common: unknown key leraning_rate; did you mean"),
        ("step1: {kl_coef: 1}", "step1: unknown key kl_coef"),
        ("step1: {output_dir: x}", "step1: unknown key output_dir"),
        ("step1: [1]", "step1 must be a mapping"),
        ("step1: {seed: x}", "step1: --seed 'x' is not a whole number"),
        ("launch: {num_gpus: two}", "launch: --num_gpus 'two' is not a whole number"),
        ("launch: {hostfile: x}", "launch: unknown key hostfile"),
        ("launch: {num_nodes: -1}", "launch: --num_nodes -1 must be at least 1"),
        ("launch: {num_gpus: 0}", "launch: --num_gpus 0 must be at least 1"),
    ],
)
def test_recipe_mistakes(tree, text, message):
    Path("mine.yaml").write_text(text)
    with pytest.raises(UserError) as error:
        plan(tree, "--recipe", "mine.yaml")
    assert str(error.value).startswith("mine.yaml: ")
    assert message in str(error.value)
