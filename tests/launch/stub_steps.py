"""Runs train.py with stub steps, in the tree that the fixture ``tree`` copies.

A stub step writes its flags to a file and marks itself COMPLETE. Environment variables make the
step of that name fail (FAIL), exit without finishing (VANISH), hang as if loading a model (HANG) or
train until a signal (LOOP).
"""

import base64
import json
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml
from python_process import environment, python

from dschat.config import RewardConfig, RLHFConfig, SFTConfig
from dschat.launch import recipe, run_plan
from dschat.runtime.output_dir import record_of, sealed

STUB = """
import json, os, pathlib, signal, subprocess, sys, time

name = pathlib.Path(__file__).parent.name
out = pathlib.Path(sys.argv[sys.argv.index("--output_dir") + 1])
out.mkdir(parents=True, exist_ok=True)
if os.environ.get("VANISH") == name:
    sys.exit(0)
if os.environ.get("HANG") == name:
    if os.environ.get("STUBBORN"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
    (out / "pids.tmp").write_text(json.dumps([os.getpid(), child.pid]))
    (out / "pids.tmp").rename(out / "pids")
    time.sleep(120)
if os.environ.get("LOOP") == name:
    import dschat.distributed as dist
    from dschat.distributed import entrypoint, stop_signals
    from dschat.checkpoint.manifest import manifest_bytes

    def main():
        if dist.world_size() > 1:
            dist.init()
        with stop_signals.handle_stop_signals(out) as stop:
            (out / f"in_loop{dist.rank()}").write_text(str(os.getpid()))
            for step in range(1, 1000):
                if os.environ.get("KILL") == str(dist.rank()) and step == 5:
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(float(os.environ.get("STEP_S", 0.1)))
                if stop.agreed():
                    folder = out / "checkpoints" / f"step_{step:06d}"
                    folder.mkdir(parents=True, exist_ok=True)
                    text = manifest_bytes(step, dist.world_size(), {}, {})
                    (folder / "manifest.json").write_bytes(text)
                    raise stop_signals.TrainingStopped(step, folder)

    entrypoint.run(main)
import dschat.distributed as dist

seen = {k: os.environ.get(k) for k in ("OMP_NUM_THREADS", "PATH", "RANK", "WORLD_SIZE")}
seen["numbers"] = (dist.rank(), dist.world_size(), dist.local_rank())
note = {"argv": sys.argv[1:], "environment": seen}
(out / f"seen{dist.rank()}.json").write_text(json.dumps(note))
if os.environ.get("FAIL") == name:
    while len(list(out.glob("seen*.json"))) < dist.world_size():  # a launcher ends the others
        time.sleep(0.05)
    sys.stderr.write(f"error: {name} says why\\n")
    sys.exit(3)
(out / "config.json").write_text("{}")
import dataclasses, yaml
from dschat.checkpoint.compatibility import contents_of
from dschat.config import RewardConfig, RLHFConfig, SFTConfig, parser
kinds = {"step1_sft": SFTConfig, "step2_reward": RewardConfig, "step3_rlhf": RLHFConfig}
config = parser.parse(kinds[name])
(out / "training_config.yaml").write_text(yaml.safe_dump(dataclasses.asdict(config)))
(out / "COMPLETE").write_text(json.dumps({"contents": contents_of(config)}))
"""

QUIET = ("--recipe", "quiet", "--output-dir", "out")


def train(*argv: str, **variables: str) -> subprocess.CompletedProcess:
    """``python train.py`` in the copied tree, as a user calls it."""
    return python("train.py", *argv, cwd=None, env=environment(**variables))


def start_train(*argv: str, **variables: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "train.py", *QUIET, *argv],
        env=environment(**variables),
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def plan(tree: Path, *argv: str) -> run_plan.RunPlan:
    return run_plan.plan(*recipe.parse_args(argv), tree)


def world_of(command: list[str]) -> dict[str, list]:
    """The machines that a command of DeepSpeed's launcher starts processes on, with their GPUs."""
    (info,) = (word.partition("=")[2] for word in command if word.startswith("--world_info"))
    return json.loads(base64.urlsafe_b64decode(info))


def planned(tree: Path, *argv: str) -> dict[int, dict[str, object]]:
    """The given fields of each planned step, read back from its command."""
    fields = {}
    for run, command in plan(tree, *argv).commands:
        flags = command[[part.endswith("main.py") for part in command].index(True) + 1 :]
        fields[run.number] = run_plan.parser.given(run.step.config_class, flags)
    return fields


# What the recipe quiet gives each step.
_MODELS = ("out/step1_sft", "out/step2_reward")
DPO = RewardConfig(model_name_or_path=_MODELS[0], seed=3, loss="dpo")  # into step 3's folder
SETTINGS = {
    "step1_sft": SFTConfig(model_name_or_path="hub/actor", seed=3),
    "step2_reward": RewardConfig(model_name_or_path="hub/reward", seed=3),
    "step3_rlhf": RLHFConfig(
        actor_model_name_or_path=_MODELS[0], critic_model_name_or_path=_MODELS[1], seed=3
    ),
}


def finish(
    folder: Path, architecture: str = "OPTForCausalLM", like: Any = None, **settings: object
) -> Path:
    """A finished step, trained ``like`` a configuration, or as the recipe quiet says, but for
    ``settings``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    config = like or SETTINGS.get(folder.name, SFTConfig())
    config = replace(config, output_dir=str(folder), **settings)
    (folder / "training_config.yaml").write_text(yaml.safe_dump(asdict(config)))
    (folder / "COMPLETE").write_text(sealed(folder, record_of(config)))
    return folder


def alive(pid: int) -> bool:
    """Whether the process runs and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def interrupted(
    argv: list[str], signals: list[int], **variables: str
) -> tuple[int, str, list[int]]:
    """Exit code and stderr of train.py after ``signals`` during a hanging first step, and the
    processes of that step.
    """
    run = start_train(*argv, HANG="step1_sft", **variables)
    pids = Path("out/step1_sft/pids")
    assert wait_for(pids.exists, 60)
    started = json.loads(pids.read_text())
    assert all(alive(pid) for pid in started)
    for signum in signals:
        run.send_signal(signum)  # to train.py only, which forwards it
        time.sleep(0.5)
    _, stderr = run.communicate(timeout=60)
    return run.returncode, stderr, started


def in_loop(*argv: str, ranks: int = 1, **variables: str) -> tuple[subprocess.Popen, list[int]]:
    """train.py, and the processes of its first step once they are in their training loop."""
    run = start_train(*argv, LOOP="step1_sft", **variables)
    files = [Path(f"out/step1_sft/in_loop{rank}") for rank in range(ranks)]
    assert wait_for(lambda: all(f.exists() and f.read_text() for f in files), 60), run.poll()
    return run, [int(file.read_text()) for file in files]
