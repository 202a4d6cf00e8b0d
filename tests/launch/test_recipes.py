"""Recipes and launch examples: they parse, and have the published numbers.

Numbers are those of microsoft/DeepSpeedExamples, applications/DeepSpeed-Chat/training, of
OpenRLHF's examples/scripts and of TRL's examples, not worked out from the files. The rate of
DeepSpeed-Chat's adapters is ``--lora_learning_rate``, whose default of 5e-4 no script changes:
``--learning_rate`` of a LoRA script is for other weights.
"""

import os
import re
import shlex
import signal
import subprocess
from functools import cache
from itertools import takewhile
from pathlib import Path

import pytest
from python_process import ROOT
from stub_steps import wait_for

from dschat.config import RLHFConfig
from dschat.launch import recipe, run_plan

RECIPES = sorted((ROOT / "training" / "recipes").glob("*.yaml"))
EXAMPLES = sorted((ROOT / "training" / "launch").glob("*.sbatch"))
LORA_RATE, FULL, CRITIC = 5e-4, 9.65e-6, 5e-6
LORA, HEAD = (LORA_RATE,) * 4, (LORA_RATE, 5e-5, LORA_RATE, CRITIC)
CHAT, LONG = (512, 512, 256, 256), (2048, 2048, 1024, 1024)
OPENRLHF = (5e-6, 9e-6, 5e-7, 9e-6)
# name -> machines, GPUs of each, tensor parallelism; rates of steps 1 and 2, of actor and critic;
# sequence lengths of steps 1 and 2, of prompt and answer; examples of step 1 and pairs of step 2 in
# an optimizer step, prompts of a rollout, sequences of an optimizer step. None: not published.
PUBLISHED = {
    "opt-1.3b": ((1, 1, 1), (FULL, 5e-5, FULL, CRITIC), CHAT, (64, 64, 32, 32)),
    "opt-6.7b": ((1, 8, 1), (FULL, 5e-5, FULL, CRITIC), CHAT, (48, 64, 32, 32)),
    "opt-13b": ((1, 8, 2), HEAD, CHAT, (32, 64, 128, 128)),
    "opt-30b-lora": ((1, 8, 2), HEAD, CHAT, (32, 64, 32, 32)),
    "opt-66b": ((8, 8, 8), HEAD, CHAT, (256, 128, 256, 256)),
    "opt-175b": ((8, 8, 8), HEAD, CHAT, (None, None, 128, 128)),
    "llama-2-7b": ((1, 8, 1), (FULL, FULL, FULL, CRITIC), CHAT, (32, 64, 8, 8)),
    "llama-2-7b-lora": ((1, 8, 1), LORA, CHAT, (32, 64, 8, 8)),
    "openrlhf-7b": ((2, 8, 1), OPENRLHF, LONG, (256, 256, 1024, 128)),
    "openrlhf-13b": ((4, 8, 1), OPENRLHF, LONG, (256, 256, 1024, 128)),
    "openrlhf-34b": ((6, 8, 4), OPENRLHF, LONG, (None, None, 1152, 144)),
    "openrlhf-70b": ((4, 8, 8), OPENRLHF, LONG, (256, 256, 1024, 128)),
    "qlora-8b-24gb": (  # ten times the rates of full fine-tuning
        *((1, 1, 1), (2e-4, 1e-4, 3e-5, None), (2048, 2048, 512, 1024)),
        (128, 64, None, None),
    ),
    "qwen3-8b": ((None,) * 3, (2e-5, 1e-5, 3e-6, 3e-6), (2048, 2048, 512, 1024), (None,) * 4),
}
# rank of steps 1 and 2, of actor and critic; the scale is 1 / rank, of QLoRA's 2
RANKS = {"llama-2-7b-lora": (128, 128, 64, 64), "qlora-8b-24gb": (32, 32, 32, 0)} | dict.fromkeys(
    ("opt-13b", "opt-30b-lora", "opt-66b", "opt-175b"), (128, 0, 128, 0)
)

# Runs of fewer steps: DPO, reward functions, or a teacher.
STEPS = {"demo-dpo": [1, 2], "smollm2-addition": [3], "smollm2-hh": [2, 3]} | dict.fromkeys(
    ("arithmetic", "arithmetic-dapo", "arithmetic-retry", "distill", "game", "long-64k")
    + ("search", "tools"),
    [1, 3],
)
# Flags in place of the result of another run, and of data that examples/ write.
FLAGS = {"distill": ["--teacher_model_name_or_path", "builtin/tiny"]}
FLAGS |= dict.fromkeys(("game", "search", "tools"), ["--data_path", "builtin/arithmetic"])


@pytest.fixture(autouse=True)
def here(monkeypatch, gpus_here):
    """The root of the tree, on a machine without GPUs."""
    monkeypatch.chdir(ROOT)


def plan(*argv: str) -> run_plan.RunPlan:
    return run_plan.plan(*recipe.parse_args([*argv, "--dry_run"]), ROOT)


@cache
def planned(name: str) -> tuple[run_plan.RunPlan, dict[int, object]]:
    """A recipe's plan, and its `configs`."""
    made = plan("--recipe", name, "--output_dir", "output/none", *FLAGS.get(name, []))
    return made, configs(made)


def configs(made: run_plan.RunPlan) -> dict[int, object]:
    """Each planned step's configuration, read back from its command and validated."""
    parsed = {}
    for run, command in made.commands:
        script = [part.endswith("main.py") for part in command].index(True)
        parsed[run.number] = run_plan.parser.parse(run.step.config_class, command[script + 1 :])
    return parsed


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_its_head_says_what_its_run_gave(path):
    head = "".join(takewhile(lambda line: line.startswith("#"), path.open()))
    assert re.search(r"^# (Run: .*\b0\.\d\d|Not run: )", head, re.M | re.S)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_plans_its_steps(path):
    made, parsed = planned(path.stem)
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
def test_a_recipe_has_the_published_numbers(name):
    made, parsed = planned(name)
    sft, reward, last = parsed.values()
    cluster, world = made.cluster, made.cluster.num_processes
    rates = (sft.learning_rate, reward.learning_rate)
    rollout = (last.rollout_prompts(world), last.mini_batch_size(world))
    found = (
        (len(cluster.hosts), cluster.processes_here, last.inference_tp_size),
        (*rates, last.actor_learning_rate, last.critic_learning_rate),
        (sft.max_seq_len, reward.max_seq_len, last.max_prompt_seq_len, last.max_answer_seq_len),
        (sft.global_batch_size(world), reward.global_batch_size(world), *rollout),
    )
    for numbers, published in zip(found, PUBLISHED[name], strict=True):
        known = [n if p is not None else None for n, p in zip(numbers, published, strict=True)]
        assert known == list(published)
    ranks = (sft.lora_dim, reward.lora_dim, last.actor_lora_dim, last.critic_lora_dim)
    assert ranks == RANKS.get(name, (0, 0, 0, 0))
    assert {c.lora_alpha for c in (sft, reward, last)} == {
        1.0 if any(ranks) and "qlora" not in name else 0.0
    }


def test_a_recipe_names_the_source_of_its_numbers():
    bases = re.compile(
        r"^ *(?:actor_model|actor_model_name_or_path): (?!builtin/|\")", re.MULTILINE
    )
    of_hub = {path.stem for path in RECIPES if bases.search(path.read_text())}
    ours = {"long-64k", "smollm2-addition", "smollm2-hh"}
    assert of_hub == PUBLISHED.keys() | ours
    for path in RECIPES:
        assert path.read_text().startswith("# "), path


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


def write_programs(folder: Path, programs: dict[str, str]) -> dict[str, str]:
    """Write scripts that a job finds first; the job's environment."""
    for name, text in programs.items():
        program = folder / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text("#!/bin/bash\n" + text)
        program.chmod(0o755)
    search = f"{folder}{os.pathsep}{os.environ['PATH']}"
    return os.environ | JOB | {"PATH": search, "CALLS": str(folder / "calls")}


def test_every_example_has_arguments():
    assert {path.stem for path in EXAMPLES} == set(WORDS)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_starts_a_command_that_parses(path, tmp_path):
    """Run the script as SLURM would, with programs that record their arguments."""
    subprocess.run(["bash", "-n", str(path)], check=True)
    environment = write_programs(tmp_path, PROGRAMS)
    command = ["bash", str(path), *WORDS[path.stem].split()]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    calls = (tmp_path / "calls").read_text()
    script, *flags = shlex.split(calls.splitlines()[-1])
    if script == "train.py":
        made = plan(*flags)
        assert made.cluster.num_processes == 64
        assert made.cluster.is_first == (path.stem == "train")
        assert [run.number for run, _ in made.commands] == [1, 2, 3]
        if path.stem == "deepspeed":
            assert "--master_addr=gpu001" in made.commands[0][1]
            assert "--node_rank=3" in made.commands[0][1]
    else:
        run_plan.parser.parse(recipe.STEPS[1].config_class, flags)
        assert calls.startswith("srun ")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
@pytest.mark.parametrize(("signum", "back"), [(signal.SIGUSR1, True), (signal.SIGTERM, False)])
def test_an_example_forwards_signals_and_requeues(path, tmp_path, signum, back):
    """SLURM signals the script; training gets the signal, and the job is requeued."""
    wait = "trap 'echo USR1 > got; exit 75' USR1\ntrap 'echo TERM > got; exit 75' TERM\n"
    wait += "touch ready\nwhile :; do sleep 0.05; done\n"
    programs = {"scontrol": 'echo "$*" >> "$CALLS"\necho gpu001\n'}
    environment = write_programs(tmp_path, programs | {"srun": wait, ".venv/bin/python": wait})
    job = subprocess.Popen(
        ["bash", str(path)],
        cwd=tmp_path,
        env=environment | {"SLURM_JOB_ID": "7"},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert wait_for((tmp_path / "ready").exists, 60)
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
