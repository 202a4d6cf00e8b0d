"""Recipes and launch examples: they parse, and give the published sizes."""

import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from dschat.config import RLHFConfig
from dschat.launch import recipe, run_plan

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "training" / "recipes").glob("*.yaml"))
EXAMPLES = sorted((ROOT / "training" / "launch").glob("*.sbatch"))

# name -> machines x GPUs, tensor parallelism, prompts of a rollout, sequences of an optimizer step,
# longest prompt and answer: worked out from the published scripts, not from the files.
PUBLISHED = {
    "opt-1.3b": (1, 1, 1, 32, 32, 256, 256),
    "opt-6.7b": (1, 8, 1, 32, 32, 256, 256),
    "opt-13b": (1, 8, 2, 128, 128, 256, 256),
    "opt-30b-lora": (1, 8, 2, 32, 32, 256, 256),
    "opt-66b": (8, 8, 8, 256, 256, 256, 256),
    "opt-175b": (8, 8, 8, 128, 128, 256, 256),
    "llama-2-7b": (1, 8, 1, 8, 8, 256, 256),
    "llama-2-7b-lora": (1, 8, 1, 8, 8, 256, 256),
    "openrlhf-7b": (2, 8, 1, 1024, 128, 1024, 1024),
    "openrlhf-13b": (4, 8, 1, 1024, 128, 1024, 1024),
    "openrlhf-34b": (6, 8, 4, 1152, 144, 1024, 1024),
    "openrlhf-70b": (4, 8, 8, 1024, 128, 1024, 1024),
}

# Runs of two steps: DPO, reward functions, or a teacher.
STEPS = {"demo-dpo": [1, 2]} | dict.fromkeys(
    ("arithmetic", "arithmetic-dapo", "arithmetic-retry", "distill", "game", "tools"), [1, 3]
)
# Flags in place of the result of another run.
FLAGS = {"distill": ["--teacher_model_name_or_path", "builtin/tiny"]}


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """The root of the tree, on a machine without GPUs."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(run_plan, "_num_gpus", lambda: 0)


def plan(*argv: str) -> run_plan.RunPlan:
    return run_plan.plan(*recipe.parse_args([*argv, "--dry_run"]), ROOT)


def configs(made: run_plan.RunPlan) -> dict[int, object]:
    """Each planned step's configuration, read back from its command and validated."""
    parsed = {}
    for step, command in made.commands:
        script = [part.endswith("main.py") for part in command].index(True)
        parsed[step.number] = run_plan.parser.parse(step.config_class, command[script + 1 :])
    return parsed


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_plans_its_steps(path, tmp_path):
    flags = FLAGS.get(path.stem, [])
    made = plan("--recipe", path.stem, "--output_dir", str(tmp_path / "out"), *flags)
    parsed = configs(made)
    assert list(parsed) == STEPS.get(path.stem, [1, 2, 3])
    for command in (command for _, command in made.commands):
        assert ("--hostfile" in command) == (len(made.cluster.hosts) > 1)
    world, last = made.cluster.num_processes, parsed.get(3)
    if last is None:
        assert parsed[2].trains_policy
        return
    assert isinstance(last, RLHFConfig)
    assert world % last.inference_tp_size == 0
    assert last.inference_tp_size <= made.cluster.processes_here  # a group stays within one machine
    assert last.rollout_samples(world) == last.num_mini_batches * last.mini_batch_size(world)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_has_the_published_sizes(name, tmp_path):
    made = plan("--recipe", name, "--output_dir", str(tmp_path / "out"))
    last, world = configs(made)[3], made.cluster.num_processes
    assert PUBLISHED[name] == (
        len(made.cluster.hosts),
        made.cluster.processes_here,
        last.inference_tp_size,
        last.rollout_prompts(world),
        last.mini_batch_size(world),
        last.max_prompt_seq_len,
        last.max_answer_seq_len,
    )


def test_a_recipe_names_the_source_of_its_numbers():
    for path in RECIPES:
        assert path.read_text().startswith("# "), path
    assert {path.stem for path in RECIPES} >= {*PUBLISHED, "demo", "demo-dpo", "qwen3-8b"}


# Stand-ins for SLURM's variables and the user's arguments
JOB = {
    "SLURM_JOB_NUM_NODES": "8",
    "SLURM_NTASKS_PER_NODE": "8",
    "SLURM_CPUS_PER_TASK": "8",
    "SLURM_JOB_NODELIST": "gpu[001-008]",
    "SLURM_NODEID": "3",
}
# Stand-ins for programs of the cluster: they record their arguments
PROGRAMS = {
    "srun": 'printf "%s\\n" "srun $*" >> "$CALLS"\n'
    'while [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"\n',
    "scontrol": "echo gpu001\necho gpu002\n",
    ".venv/bin/python": 'printf "%q " "$@" >> "$CALLS"\necho >> "$CALLS"\n',
}
WORDS = {
    "train": "--recipe opt-66b --output_dir output/opt-66b",
    "deepspeed": "--recipe opt-66b --output_dir output/opt-66b",
    "step": "step1_sft/main.py --model_name_or_path facebook/opt-1.3b --zero_stage 3",
}


def test_every_example_has_arguments():
    assert {path.stem for path in EXAMPLES} == set(WORDS)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_starts_a_command_that_parses(path, tmp_path):
    """Run the script as SLURM would, with programs that record their arguments."""
    subprocess.run(["bash", "-n", str(path)], check=True)
    for name, text in PROGRAMS.items():
        program = tmp_path / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text("#!/bin/bash\n" + text)
        program.chmod(0o755)
    calls = tmp_path / "calls"
    search = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        ["bash", str(path), *WORDS[path.stem].split()],
        cwd=tmp_path,
        env=os.environ | JOB | {"PATH": search, "CALLS": str(calls)},
        check=True,
    )
    script, *flags = shlex.split(calls.read_text().splitlines()[-1])
    if script == "train.py":
        made = plan(*flags)
        assert made.cluster.num_processes == 64
        assert made.cluster.is_first == (path.stem == "train")
        assert [step.number for step, _ in made.commands] == [1, 2, 3]
        if path.stem == "deepspeed":
            assert "--master_addr=gpu001" in made.commands[0][1]
            assert "--node_rank=3" in made.commands[0][1]
    else:
        run_plan.parser.parse(recipe.STEPS[1].config_class, flags)
        assert calls.read_text().startswith("srun ")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
@pytest.mark.parametrize(("signum", "back"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_an_example_forwards_signals_and_requeues(path, tmp_path, signum, back):
    """SLURM signals the script; training gets the signal, and the job is requeued."""
    wait = "trap 'echo USR1 > got; exit 75' USR1\ntrap 'echo TERM > got; exit 75' TERM\n"
    wait += "touch ready\nwhile :; do sleep 0.05; done\n"
    programs = {"scontrol": 'echo "$*" >> scontrol\necho gpu001\n', "srun": wait}
    for name, text in (programs | {".venv/bin/python": wait}).items():
        program = tmp_path / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text("#!/bin/bash\n" + text.replace(">> scontrol", ">> calls"))
        program.chmod(0o755)
    search = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    job = subprocess.Popen(
        ["bash", str(path)],
        cwd=tmp_path,
        env=os.environ | JOB | {"PATH": search, "SLURM_JOB_ID": "7"},
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "ready").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    job.send_signal(signum)
    stderr = job.communicate(timeout=60)[1]
    assert (tmp_path / "got").read_text() == f"{signum.name[3:]}\n"
    calls = tmp_path / "calls"
    requeued = calls.exists() and "requeue 7" in calls.read_text()
    assert (job.returncode, requeued) == ((0, True) if back else (75, False)), stderr


def test_commands_in_comments_parse(tmp_path):
    """The usage lines at the start of the examples."""
    lines = {
        path.name: re.findall(r"^#   (.*)$", path.read_text(), flags=re.MULTILINE)
        for path in [*EXAMPLES, ROOT / "training" / "launch" / "hostfile"]
    }
    assert all(len(found) == 1 for found in lines.values()), lines
    for name, (line,) in lines.items():
        program, script, *words = line.split()
        if program == "sbatch":
            assert script == f"training/launch/{name}"
            assert " ".join(words) == WORDS[name.partition(".")[0]]
        else:
            assert (program, script) == ("python", "train.py")
            assert plan(*words, "--output_dir", str(tmp_path)).cluster.num_processes == 64
