"""Planned runs: steps to run, their commands and processes, and errors before anything runs."""

import os
import sys
from pathlib import Path

import pytest
from python_process import LAUNCHER
from stub_steps import QUIET, finish, plan, planned, world_of

from dschat.config import UserError
from dschat.distributed.env import pin

RECIPE = "--recipe quiet"


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


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--leraning-rate 1", "unknown flag --leraning-rate; did you mean --learning_rate?"),
        ("--step3.kl_cof 1", "unknown flag --step3.kl_cof; did you mean --step3.kl_coef?"),
        ("--step1.kl_coef 1", "unknown flag --step1.kl_coef"),
        ("--step4.seed 1", "unknown flag --step4.seed"),
        ("--actor-modle x", "unknown flag --actor-modle; did you mean --actor_model?"),
        ("--config x.yaml", "unknown flag --config"),
        ("--step 1 --kl_coef 1", "--kl_coef is a flag of step 3; add the step to --step"),
        ("--step 4", "--step 4 does not exist"),
        ("--step one", "--step 'one' is not a whole number"),
        ("3", "unexpected argument '3'"),
        ("--recipe nope", "--recipe nope: no such recipe; name a .yaml file or one of "),
        ("--reward-model hub/r", "--actor_model is missing"),
        ("--actor-model hub/a", "--reward_model is missing"),
        ("--actor-model ./nope", "--actor_model ./nope: no such folder"),
        ("--step 2 --model_name_or_path /no/such", "--model_name_or_path /no/such: no such folder"),
        ("--actor-model training --reward-model x", "--actor_model training: no config.json"),
        (
            "--actor-model 1.3b --reward-model 350M",
            "--actor_model 1.3b --reward_model 350M: not the name of a model; write it whole: "
            "--actor_model facebook/opt-1.3b --reward_model facebook/opt-350m",
        ),
        (
            "--actor-model opt-13b --reward-model x",
            "--actor_model opt-13b: not the name of a model",
        ),
        (
            "--reward-zero-stage 3 --deployment-type single_gpu --wandb",
            "unknown flags: --reward-zero-stage (use --step2.zero_stage), --deployment-type (use "
            "--num_gpus: or --hostfile), --wandb (use --report_to wandb)",
        ),
        ("--data-path no.jsonl:0.5", "--data_path: no such data file: no.jsonl"),
        ("--eval-data-path ./no", "--eval_data_path: no such data file: ./no"),
        ("--unsupervised-dataset-name no.txt", "--unsupervised_dataset_name: no such data file"),
        ("--step3.actor_zero_stage 9", "--actor_zero_stage 9 must be between 0 and 3"),
        ("--per_device_training_batch_size 7", "--per_device_training_batch_size x"),
        # of a policy that learns from pairs
        (f"{RECIPE} --loss dpo --step 3", "--step 3 does not exist with --loss dpo"),
        (f"{RECIPE} --loss dpo --reward-model hub/r", "--reward_model hub/r is not used with --lo"),
        (f"{RECIPE} --loss dop", "--loss 'dop'"),
        (f"{RECIPE} --beta 0.5", "--beta is not used by --loss pairwise"),
        (f"{RECIPE} --loss kto --streaming --max_steps 5", "--loss kto reads all pairs"),
        # of resuming
        (f"{RECIPE} --restart --resume", "--restart starts over and --resume resumes; leave one "),
        (f"{RECIPE} --resume --overwrite-output-dir", "--resume continues a run and --overwrite_o"),
        (
            f"{RECIPE} --resume out/x",
            "--resume out/x is a checkpoint of one step; name the step: --step3.resume",
        ),
        (f"{RECIPE} --save-steps -1", "--save_steps -1 must not be negative"),
        (f"{RECIPE} --save-total-limit -1", "--save_total_limit -1 must not be negative"),
    ],
)
def test_mistakes_are_found_before_anything_runs(tree, argv, message):
    with pytest.raises(UserError) as error:
        plan(tree, *argv.split())
    assert str(error.value).startswith(message)
    assert not Path("output").exists()


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
