"""Planned runs: steps to run, their commands and processes, and errors before anything runs."""

import os
import sys
from pathlib import Path

import pytest
from python_process import LAUNCHER
from stub_steps import QUIET, finish, plan, planned, world_of

from dschat.config import UserError
from dschat.distributed.env import pin


def test_no_flags_is_the_demo(tree):
    fields = planned(tree)
    assert fields[1]["model_name_or_path"] == "builtin/tiny"
    assert fields[2]["model_name_or_path"] == "output/demo/step1_sft"  # the recipe's {step1}
    assert fields[3]["output_dir"] == "output/demo/step3_rlhf"
    assert plan(tree).summary


def test_design_example_with_many_processes(tree, monkeypatch, gpus_here):
    gpus_here(64)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    argv = "--step 3 --actor-model facebook/opt-66b --reward-model facebook/opt-350m --num-gpus 64"
    made = plan(tree, *argv.split())
    assert [run.number for run, _ in made.commands] == [1, 2, 3]
    assert len(made.notes) == 2
    assert made.output_dir == Path("output/opt-66b")
    for _, command in made.commands:
        assert command[:3] == [sys.executable, "-m", "deepspeed.launcher.launch"]
        assert world_of(command) == {"node0": [*range(64)]}
    assert not made.summary


def test_missing_steps_run_first_and_finished_ones_are_reused(tree):
    argv = ("--step", "3", *QUIET, "--max_seq_len", "64")
    (finish(Path("out/step1_sft")) / "COMPLETE").unlink()
    assert list(planned(tree, *argv)) == [1, 2, 3]
    finish(Path("out/step1_sft"), max_seq_len=64)
    made = plan(tree, *argv)
    assert [run.number for run, _ in made.commands] == [2, 3]
    assert "out/step1_sft" in made.notes[0]
    assert "step 2 runs first" in made.notes[1]
    finish(Path("out/step2_reward"), max_seq_len=64)
    assert list(planned(tree, *argv)) == [3]
    finish(Path("out/step3_rlhf"))
    assert list(planned(tree, *argv)) == []
    assert list(planned(tree, *argv, "--overwrite-output-dir")) == [3]


def test_a_step_finished_with_other_settings_is_refused_unless_reused(tree):
    finish(Path("out/step1_sft"), max_steps=7)
    other = r"out/step1_sft is finished, with other settings \({}\); --reuse .* --step1.over"
    with pytest.raises(UserError, match=other.format("max_steps: 7 -> 0")):
        plan(tree, *QUIET)
    assert list(planned(tree, *QUIET, "--step1.max_steps", "7")) == [2, 3]
    assert list(planned(tree, *QUIET, "--step1.overwrite_output_dir")) == [1, 2, 3]
    taken = plan(tree, *QUIET, "--reuse")
    assert [step.number for step, _ in taken.commands] == [2, 3]
    assert taken.notes[-1].endswith("from out/step1_sft with other settings (max_steps: 7 -> 0)")
    # A step that is not in --step: what the recipe and flags say of it, nothing that they leave
    # out, and no flag that step 3 takes.
    later = (*QUIET, "--step", "3")
    assert list(planned(tree, *later, "--data-path", "builtin/chat", "--seed", "5")) == [2, 3]
    for flags, change in (
        (("--actor-model", "hub/b"), "model_name_or_path: hub/actor -> hub/b"),
        (("--step1.seed", "5"), "seed: 3 -> 5"),
        (("--max_seq_len", "64"), "max_seq_len: 512 -> 64"),  # which step 3 does not have
    ):
        with pytest.raises(UserError, match=other.format(change)):
            plan(tree, *later, *flags)
    assert list(planned(tree, *later, "--actor-model", "hub/b", "--reuse")) == [2, 3]
    finish(Path("out/step3_rlhf"), kl_coef=0.5, actor_model_name_or_path=None)
    with pytest.raises(UserError, match="out/step3_rlhf is finished, with .*kl_coef: 0.5 -> 0.1"):
        plan(tree, *later, "--reward-model", "hub/reward", "--critic_model_name_or_path", "hub/c")


def test_trained_models_need_no_training_step(tree):
    actor = finish(Path("old/step1_sft"))
    reward = finish(Path("bought/reward"), "LlamaForSequenceClassification")
    (reward / "COMPLETE").unlink()  # any reward model will do, not only ours
    argv = ("--actor-model", str(actor), "--reward-model", str(reward))
    fields = planned(tree, *argv)
    assert list(fields) == [3]
    assert fields[3]["actor_model_name_or_path"] == "old/step1_sft"
    assert fields[3]["critic_model_name_or_path"] == "bought/reward"
    # Asked for by number, the steps do run, from these models.
    again = planned(tree, *argv, "--step", "1", "2", "3")
    assert again[1]["model_name_or_path"] == "old/step1_sft"
    assert again[3]["actor_model_name_or_path"] == "output/step1_sft/step1_sft"


def test_step_three_takes_named_models(tree):
    argv = ("--actor_model_name_or_path", "hub/sft", "--reward_model_name_or_path", "hub/rm")
    fields = planned(tree, *argv)
    assert list(fields) == [3]
    assert fields[3]["reward_model_name_or_path"] == "hub/rm"
    assert "critic_model_name_or_path" not in fields[3]  # step 3 fills one in by the other


def test_a_name_too_long_for_a_disk_is_not_a_folder(tree):
    """pathlib's ``exists`` raises there."""
    name = "1" * 400
    planned = plan(tree, "--recipe", "quiet", "--actor-model", name, "--step", "1")
    assert [run.number for run, _ in planned.commands] == [1]


def test_several_machines(tree, gpus_here):
    gpus_here(4)
    argv = ("--recipe", "quiet", "--num-nodes", "2", "--node-rank", "1", "--master-addr", "a")
    made = plan(tree, *argv)
    assert made.cluster.num_processes == 8
    ports = [word for _, command in made.commands for word in command if "master_port" in word]
    assert ports == [f"--master_port={29500 + n}" for n in range(3)]
    with pytest.raises(UserError, match="--inference_tp_size 3 does not divide the 8 processes"):
        plan(tree, *argv, "--inference_tp_size", "3")


def test_only_the_first_machine_looks_for_the_complete_file(tree):
    """Another one's view of a shared disk may lag behind, and it would leave the first alone."""
    argv = ("--recipe", "demo", "--num-nodes", "2", "--master-addr", "a", "--output-dir", "out")
    first, second = (plan(tree, *argv, "--node-rank", str(n)) for n in (0, 1))
    (run, _), *_ = first.commands
    assert not first.finished(run)
    assert second.finished(run)
    assert (first.summary, second.summary) == (True, False)
    # Both would run the same steps, each with its own number.
    assert [c for _, c in second.commands] == [
        [word.replace("--node_rank=0", "--node_rank=1") for word in c] for _, c in first.commands
    ]


def test_processes_share_cpu_threads(tree, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    made = plan(tree, "--recipe", "quiet", "--num-gpus", "3")
    assert made.environment["OMP_NUM_THREADS"] == "2"
    assert made.environment["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert plan(tree, "--recipe", "quiet").environment["OMP_NUM_THREADS"] == "5"


def test_train_py_is_not_a_task_itself(tree, monkeypatch):
    """srun python train.py: every task would start all processes."""
    pin(False)  # a test before it may have joined a group, which sets LAUNCHER
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    with pytest.raises(UserError, match="4 processes run train.py"):
        plan(tree, "--recipe", "quiet")
    by_hand = ("--num-nodes", "4", "--node-rank", "2", "--master-addr", "gpu1")
    assert plan(tree, "--recipe", "quiet", *by_hand).cluster.num_processes == 4
