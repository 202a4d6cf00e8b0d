"""train.py as a command: output, exit codes, launchers."""

import json
import os
import shlex
import sys
from pathlib import Path

import pytest
from stub_steps import QUIET, train


def test_dry_run_prints_runnable_commands_and_nothing_else(tree):
    before = sorted(tree.rglob("*"))
    done = train("--recipe", "quiet", "--dry-run", "--step3.kl-coef", "0.05", "--output-dir", "a b")
    python = shlex.quote(sys.executable)
    assert done.stdout.splitlines() == [
        f"{python} step1_sft/main.py --seed 3 --model_name_or_path hub/actor "
        "--output_dir 'a b/step1_sft'",
        f"{python} step2_reward/main.py --seed 3 --model_name_or_path hub/reward "
        "--output_dir 'a b/step2_reward'",
        f"{python} step3_rlhf/main.py --seed 3 --kl_coef 0.05 "
        "--actor_model_name_or_path 'a b/step1_sft' "
        "--critic_model_name_or_path 'a b/step2_reward' --output_dir 'a b/step3_rlhf'",
    ]
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(tree.rglob("*")) == before


def test_runs_the_steps_in_order_and_prints_the_chat_command(tree):
    done = train(*QUIET, OMP_NUM_THREADS="1")
    assert (done.returncode, done.stderr) == (0, "")
    seen = json.loads(Path("out/step3_rlhf/seen0.json").read_text())
    assert seen["argv"][-2:] == ["--output_dir", "out/step3_rlhf"]
    assert done.stdout.endswith("chat with it: python chat.py --path out/step3_rlhf/actor\n")
    order = [done.stdout.index(f"== step {n}:") for n in (1, 2, 3)]
    assert order == sorted(order)


@pytest.mark.slow
def test_a_failing_step_ends_the_run_with_its_message_and_code(tree):
    done = train(*QUIET, FAIL="step2_reward")
    assert done.returncode == 3
    assert done.stderr == "error: step2_reward says why\n"
    assert Path("out/step1_sft/COMPLETE").exists()
    assert not Path("out/step3_rlhf").exists()


@pytest.mark.slow
def test_a_step_that_ends_without_finishing_is_a_failure(tree):
    done = train(*QUIET, VANISH="step1_sft")
    assert done.returncode == 1
    assert "step 1 exited without finishing" in done.stdout
    assert not Path("out/step2_reward").exists()


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("failing", ["step1_sft", "step2_reward"])
def test_two_processes_under_the_launcher(failing, tree):
    """DeepSpeed's launcher starts both and passes on a rank's exit code."""
    argv = (*QUIET, "--num-gpus", "2")
    done = train(*argv, FAIL=failing)
    assert done.returncode == 3
    assert f"error: {failing} says why" in done.stderr
    seen = [json.loads(Path(f"out/step1_sft/seen{r}.json").read_text()) for r in (0, 1)]
    assert [s["environment"]["RANK"] for s in seen] == ["0", "1"]
    assert {s["environment"]["WORLD_SIZE"] for s in seen} == {"2"}
    assert seen[1]["argv"][0] == "--local_rank=1"


SRUN = """#!/bin/bash
# Two machines of two tasks, all here
while [ "${1#--}" != "$1" ]; do case $1 in *=*) shift;; *) shift 2;; esac; done
for rank in 0 1 2 3; do
    SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=4 SLURM_PROCID=$rank \\
        SLURM_LOCALID=$((rank % 2)) SLURM_STEP_NODELIST=gpu[1-2] "$@" &
    pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
exit "${code:-0}"
"""


@pytest.mark.slow
def test_srun_starts_the_steps(tree):
    """One train.py, as in a batch script; every task of a step knows its rank."""
    (tree / "bin").mkdir()
    (tree / "bin" / "srun").write_text(SRUN)
    (tree / "bin" / "srun").chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    path = os.pathsep.join([str(tree / "bin"), os.environ["PATH"]])
    argv = (*QUIET, "--launcher", "slurm")
    argv += ("--num-nodes", "2", "--num-gpus", "2")
    done = train(*argv, PATH=path, FAIL="step2_reward", **job)
    assert done.returncode == 3
    assert "error: step2_reward says why" in done.stderr
    seen = [json.loads(Path(f"out/step1_sft/seen{r}.json").read_text()) for r in range(4)]
    numbers = [s["environment"]["numbers"] for s in seen]
    assert numbers == [[0, 4, 0], [1, 4, 1], [2, 4, 0], [3, 4, 1]]
