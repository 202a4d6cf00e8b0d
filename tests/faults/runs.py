"""Real training processes that are killed, and what they leave: commands, kills, comparisons.

A `Case` is a step's command in small. It is run whole once, then again and again with a kill at
some instant, and gone on with until it ends; both must have recorded the same. Plain functions:
tests and `make faults` use them.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from dschat.builtin_model import resolve_model

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 600
# What a clock or a neighbour decides.
NOT_COMPARED = ("time/", "throughput/", "memory/")

_COMMON = "--data_path builtin/chat --max_eval_samples 8 --no_enable_tensorboard --save_steps 2"
_SUPERVISED = (
    "--max_steps 7 --per_device_train_batch_size 4 --gradient_accumulation_steps 2 "
    "--per_device_eval_batch_size 8 --max_seq_len 64 --eval_steps 3 --learning_rate 1e-3"
)
_RLHF = (
    "--max_steps 6 --per_device_generation_batch_size 4 --num_samples_per_prompt 2 "
    "--per_device_training_batch_size 4 --ppo_epochs 2 --max_prompt_seq_len 32 "
    "--max_answer_seq_len 8 --eval_steps 3 --actor_learning_rate 1e-3 --kl_target 1"
)


@dataclass(frozen=True)
class Case:
    """One command. ``extra``: flags in one string; ``ranks``: processes."""

    step: int
    extra: str = ""
    ranks: int = 1

    @property
    def name(self) -> str:
        return f"step{self.step}-{self.ranks}-{self.extra.replace('--', '').replace(' ', '_')}"

    def command(self, models: Path, out: Path) -> list[str]:
        script = {1: "step1_sft", 2: "step2_reward", 3: "step3_rlhf"}[self.step]
        flags = f"{_COMMON} {_RLHF if self.step == 3 else _SUPERVISED} {self.extra}".split()
        if self.step == 3:
            flags += ["--actor_model_name_or_path", str(models / "actor")]
            if "--reward_fn" not in flags:
                flags += ["--critic_model_name_or_path", str(models / "reward")]
        else:
            flags += ["--model_name_or_path", str(models / "actor")]
        start = [sys.executable]
        if self.ranks > 1:
            start += ["-m", "torch.distributed.run", "--standalone"]
            start += ["--nproc_per_node", str(self.ranks)]
        return [*start, str(ROOT / script / "main.py"), *flags, "--output_dir", str(out)]


def make_models(folder: Path) -> Path:
    """A tiny actor and reward model to start from."""
    source = resolve_model("builtin/tiny")
    tokenizer = AutoTokenizer.from_pretrained(source)
    AutoModelForCausalLM.from_pretrained(source).save_pretrained(folder / "actor")
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_pretrained(source, num_labels=1).save_pretrained(
        folder / "reward"
    )
    for name in ("actor", "reward"):
        tokenizer.save_pretrained(folder / name)
    return folder


def environment() -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def start(command: list[str], log: Path) -> subprocess.Popen:
    with log.open("ab") as file:
        return subprocess.Popen(
            command, env=environment(), stdout=file, stderr=file, start_new_session=True
        )


def finish(command: list[str], log: Path) -> int:
    """Run to the end; the exit code."""
    process = start(command, log)
    try:
        return process.wait(TIMEOUT_S)
    finally:
        kill(process)


def kill(process: subprocess.Popen, signum: int = signal.SIGKILL) -> None:
    """The whole group, and what it leaves behind."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signum)
    process.wait()


def rows(out: Path) -> list[dict[str, Any]]:
    """What metrics.jsonl says, but for what is not compared."""
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [
        {k: v for k, v in json.loads(line).items() if not k.startswith(NOT_COMPARED)}
        for line in lines
    ]


def num_rows(out: Path) -> int:
    try:
        return (out / "metrics.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def is_saving(out: Path) -> bool:
    """Whether a checkpoint is being written at this instant."""
    folder = out / "checkpoints"
    return folder.is_dir() and any(name.startswith(".") for name in os.listdir(folder))


def kill_once(case: Case, models: Path, out: Path, whole: int, rng: random.Random) -> str:
    """Start ``case``, or go on with it, and kill it at a random instant; what it was doing.

    ``whole``: rows of a run that nobody kills. The instant is after a random number of them and a
    random pause, or in the middle of a save. "ended" where it was faster.
    """
    command = case.command(models, out) + ["--resume"] * (out / "checkpoints").is_dir()
    process = start(command, out.with_suffix(".log"))
    in_save = rng.random() < 0.4
    target = rng.randint(num_rows(out), max(num_rows(out), whole - 4))
    deadline = time.monotonic() + TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        found = num_rows(out)
        if found >= target and (not in_save or is_saving(out) or found >= target + 2):
            time.sleep(rng.random() * (0.02 if in_save else 0.4))
            break
        time.sleep(0.002)
    ended = process.poll() is not None
    kill(process)
    return "ended" if ended else "a save" if in_save else "a step"


def survive(
    case: Case, models: Path, out: Path, expected: list[dict], kills: int, seed: str
) -> int:
    """Kill ``case`` up to ``kills`` times, go on to its end, and compare; the kills there were."""
    rng, done = random.Random(seed), 0
    for _ in range(kills):
        if kill_once(case, models, out, len(expected), rng) == "ended":
            break
        done += 1
    if not (out / "COMPLETE").exists():
        command = case.command(models, out) + ["--resume"] * (out / "checkpoints").is_dir()
        log = out.with_suffix(".log")
        assert finish(command, log) == 0, log.read_text()[-3000:]
    assert rows(out) == expected, out
    return done
