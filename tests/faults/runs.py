"""Kills real training processes and compares what they leave.

A `Case` is a step's command in small. It runs undisturbed once; then it is killed at random
moments and resumed until it finishes. Both must have the same metrics and weights.
"""

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forked
import torch
from driver import PHASES
from python_process import ROOT
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from dschat.builtin.chat_rows import builtin_rows
from dschat.builtin.tiny_model import resolve_model

DRIVER = Path(__file__).with_name("driver.py")
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
TIMEOUT_S = 600
# What a clock or a neighbour decides.
NOT_COMPARED = ("time/", "throughput/", "memory/")
# What a kill interrupts, in addition to the `driver`'s phases.
WRITING, RENAMING = "a checkpoint's files", "a checkpoint's rename"
KINDS = (*PHASES, WRITING, RENAMING)

_COMMON = "--max_eval_samples 8 --report_to none --save_steps 2"
_SUPERVISED = (
    "--max_steps 7 --per_device_train_batch_size 4 --gradient_accumulation_steps 2 "
    "--per_device_eval_batch_size 8 --max_seq_len 64 --eval_steps 3 --learning_rate 1e-3"
)
_RLHF = (
    "--max_steps 6 --per_device_generation_batch_size 4 --num_samples_per_prompt 2 "
    "--per_device_training_batch_size 4 --ppo_epochs 2 --max_prompt_seq_len 32 "
    "--max_answer_seq_len 8 --eval_steps 3 --actor_learning_rate 1e-3 --kl_target 1"
)
_COLUMNS = ("prompt", "chosen", "rejected")


@dataclass(frozen=True)
class Case:
    """One command. ``extra``: flags in one string, ``{models}`` the folder of `make_models`,
    ``{here}`` this one; ``ranks``: processes.
    """

    step: int
    extra: str = ""
    ranks: int = 1

    @property
    def name(self) -> str:
        extra = self.extra.replace("--", "").replace(" ", "_")
        extra = extra.replace("{models}/", "").replace("{here}/", "")
        return f"step{self.step}-{self.ranks}-{extra}"

    def command(self, models: Path, out: Path) -> list[str]:
        script = {1: "step1_sft", 2: "step2_reward", 3: "step3_rlhf"}[self.step]
        flags = f"{_COMMON} {_RLHF if self.step == 3 else _SUPERVISED} {self.extra}".split()
        if "--data_path" not in flags:
            flags += ["--data_path", "{models}/chat.jsonl"]
        flags = [flag.format(models=models, here=DRIVER.parent) for flag in flags]
        if self.step == 3:
            actor = "player" if {"--environment", "--agent"} & {*flags} else "actor"
            flags += ["--actor_model_name_or_path", str(models / actor)]
            if "--reward_fn" not in flags:
                flags += ["--critic_model_name_or_path", str(models / "reward")]
        else:
            flags += ["--model_name_or_path", str(models / "actor")]
        start = [sys.executable]
        if self.ranks > 1:
            start += ["-m", "torch.distributed.run", "--standalone"]
            start += ["--nproc_per_node", str(self.ranks)]
        script = str(ROOT / script / "main.py")
        return [*start, str(DRIVER), script, *flags, "--output_dir", str(out)]


def make_models(folder: Path) -> Path:
    """A tiny actor and reward model to start from, preferences (of builtin/chat, whose rows take
    longer to read than a run), and a text for the pretraining loss. The actor called player ends
    one token in four: its answers are turns.
    """
    source = resolve_model("builtin/tiny")
    tokenizer = AutoTokenizer.from_pretrained(source)
    actor = AutoModelForCausalLM.from_pretrained(source)
    actor.save_pretrained(folder / "actor")
    assert tokenizer.eos_token_id % 4 == 1
    actor.generation_config.eos_token_id = [*range(1, len(tokenizer), 4)]
    actor.save_pretrained(folder / "player")
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_pretrained(source, num_labels=1).save_pretrained(
        folder / "reward"
    )
    for name in ("actor", "player", "reward"):
        tokenizer.save_pretrained(folder / name)
    rows = [{x: row[x] for x in _COLUMNS} for row in builtin_rows()["train"][:600]]
    (folder / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    text = "the sun is a star and the moon goes round the world once a month"
    words = text.split()
    paragraphs = [" ".join(words[i:] + words[:i]) * (1 + i % 3) for i in range(len(words))]
    (folder / "text.txt").write_text("\n\n".join(paragraphs * 8))
    return folder


# -- Running


def start(command: list[str], log: Path, **variables: str) -> subprocess.Popen:
    """``variables``: for the `driver`, FAULT and PHASES."""
    with log.open("ab") as file:
        env = os.environ | ENVIRONMENT | variables  # on GPUs where the forks are
        options = {"stdout": file, "stderr": file, "start_new_session": True}
        return subprocess.Popen(command, env=env, **options)


def finish(command: list[str], log: Path, **variables: str) -> int:
    """Run to the end; the exit code. A step in one process runs in a fork."""
    if command[1] == str(DRIVER):
        outcome = forked.run(*command[1:], variables=variables, limit_s=TIMEOUT_S)
        with log.open("a") as file:
            file.write(outcome.stdout + outcome.stderr)
        return outcome.code
    process = start(command, log, **variables)
    try:
        return process.wait(TIMEOUT_S)
    finally:
        kill(process, command)


def kill(process: subprocess.Popen, command: list[str]) -> None:
    """All processes of a command at once: torchrun's are in no group with it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    while left := processes_of(output_of(command)):
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def output_of(command: list[str]) -> Path:
    """Where a step, or train.py, writes."""
    flag = next(word for word in ("--output_dir", "--output-dir") if word in command)
    return Path(command[command.index(flag) + 1])


def processes_of(out: Path) -> list[int]:
    """Those that write into ``out`` or a folder in it, and who started them."""
    found, mine = [], str(out).encode()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if any(word == mine or word.startswith(mine + b"/") for word in words):
                found.append(int(path.parent.name))
    return found


def going_on(command: list[str]) -> list[str]:
    """The same command, which resumes where it has a checkpoint."""
    return command + ["--resume"] * (output_of(command) / "checkpoints").is_dir()


# -- Looking


def rows(out: Path) -> list[dict[str, Any]]:
    """What metrics.jsonl says, but for what is not compared; NaN as text, which equals itself."""
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [
        {
            k: v if v == v else "NaN"
            for k, v in json.loads(line).items()
            if not k.startswith(NOT_COMPARED)
        }
        for line in lines
    ]


def weights(out: Path) -> dict[str, str]:
    """Checksums of all weights that a step saved at its end."""
    found = sorted(path for path in out.rglob("*.safetensors") if "checkpoints" not in path.parts)
    return {
        str(path.relative_to(out)): hashlib.blake2b(path.read_bytes()).hexdigest() for path in found
    }


def num_rows(out: Path) -> int:
    try:
        return (out / "metrics.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def is_saving(out: Path) -> bool:
    """Whether a checkpoint is being written at this instant."""
    folder = out / "checkpoints"
    return folder.is_dir() and any(name.startswith(".") for name in os.listdir(folder))


def phase(folder: Path) -> str:
    """What the processes are doing: the one that has come farthest."""
    said = {path.read_text().strip() for path in folder.iterdir()}
    return max(said & {*PHASES}, key=PHASES.index, default=PHASES[0])


# -- Killing


def kill_once(case: Case, models: Path, out: Path, whole: int, rng: random.Random) -> str:
    """Start or resume ``case`` and kill it at a random instant; one of `KINDS`, or "" if
    it was faster.

    ``whole``: rows of an undisturbed run. In half of the cases the process ends itself, at a
    change that it is about to make to a checkpoint's folder; else all processes are ended after a
    random number of rows and a random pause.
    """
    command = case.command(models, out)
    phases = out.with_suffix(".phases")
    shutil.rmtree(phases, ignore_errors=True)
    phases.mkdir()
    kind, fault = rng.choice(
        [("", ""), ("", ""), (WRITING, "die_writing"), (RENAMING, "die_renaming")]
    )
    if fault:
        fault += f" {rng.randint(1, 30 if kind == WRITING else 3)}"
    process = start(going_on(command), out.with_suffix(".log"), FAULT=fault, PHASES=str(phases))
    in_start = rng.random() < 0.1
    target = rng.randint(num_rows(out), max(num_rows(out), whole - 4))
    deadline = time.monotonic() + TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        begun = in_start or phase(phases) != PHASES[0]
        if not fault and begun and num_rows(out) >= target:
            time.sleep(rng.random() * 0.5)
            break
        time.sleep(0.002)
    ended = process.poll() == 0
    found = WRITING if is_saving(out) else phase(phases)
    kill(process, command)
    return "" if ended else kind or found


def survive(
    case: Case, models: Path, out: Path, whole: Path, kills: int, seed: str
) -> Counter[str]:
    """Kill ``case`` up to ``kills`` times, resume it to its end, compare with the run in ``whole``;
    the kills that there were, by kind.
    """
    rng, done, log = random.Random(seed), Counter(), out.with_suffix(".log")
    for _ in range(kills):
        kind = kill_once(case, models, out, num_rows(whole), rng)
        if not kind:
            break
        done[kind] += 1
    if not (out / "COMPLETE").exists():
        assert finish(going_on(case.command(models, out)), log) == 0, log.read_text()[-3000:]
    check_same(out, whole)
    return done


def ran(case, models, out, *flags, code=0, **variables) -> str:
    """Run or resume ``case``; returns its output. FAULT: see `driver`."""
    command, log = case.command(models, out), out.with_suffix(".log")
    log.unlink(missing_ok=True)
    found = finish([*going_on(command), *flags], log, **variables)
    said = log.read_text()
    assert found == code, said[-3000:]
    return said


def check_same(out: Path, whole: Path) -> None:
    assert rows(out) == rows(whole), out
    assert weights(out) == weights(whole) != {}, out
