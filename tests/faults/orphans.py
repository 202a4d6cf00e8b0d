"""Kills train.py alone, as for lack of memory, and starts the same command at once."""

import random
import sys
import time
from pathlib import Path

from runs import ROOT, check_same, finish, kill, processes_of, start

_COMMON = "--data-path builtin/chat --max_eval_samples 8 --report_to none"
_STEP1 = "--step1.max_steps 60 --step1.per_device_train_batch_size 4 --step1.max_seq_len 64"
_STEP1 += " --step1.save_steps 5"
_STEP3 = (
    "--step3.max_steps 8 --step3.per_device_generation_batch_size 4 --step3.save_steps 2 "
    "--step3.num_samples_per_prompt 2 --step3.per_device_training_batch_size 4 "
    "--step3.max_prompt_seq_len 32 --step3.max_answer_seq_len 8 --step3.advantage_estimator grpo "
    "--step3.reward_fn length --step3.reward_args length.target=20 "
    "--step3.actor_learning_rate 1e-3"
)
SWEEP = {((1, 3), 1): 12, ((1,), 2): 8}  # (steps, processes) -> kills in `make faults`


def train_py(models: Path, out: Path, steps: tuple[int, ...] = (1,), ranks: int = 1) -> list[str]:
    argv = f"{_COMMON} {_STEP1} {_STEP3 if 3 in steps else ''} --num-gpus {ranks} --step".split()
    argv += [*map(str, steps), "--actor-model", str(models / "actor"), "--output-dir", str(out)]
    return [sys.executable, str(ROOT / "train.py"), *argv]


def survive_alone(command: list[str], whole: Path, seconds: float, kills: int, seed: str) -> int:
    """Kill the train.py of ``command`` up to ``kills`` times, at instants within ``seconds``, each
    time followed by the same command; that ends as the run in ``whole``. The kills that there were.
    """
    out = Path(command[-1])
    rng, log, done = random.Random(seed), out.with_suffix(".log"), 0
    while True:
        process = start(command, log)
        try:
            if done < kills:
                deadline = time.monotonic() + rng.uniform(0, seconds)
                while process.poll() is None and time.monotonic() < deadline:
                    time.sleep(0.01)
            else:
                process.wait()
        finally:
            process.kill()  # it alone
        if process.wait() != -9:
            break
        done += 1
    try:
        assert process.returncode == 0, log.read_text()[-3000:]
        assert not processes_of(out)
    finally:
        kill(process, command)
    folders = sorted(path.parent.name for path in whole.glob("*/COMPLETE"))
    assert sorted(path.parent.name for path in out.glob("*/COMPLETE")) == folders != []
    for name in folders:
        check_same(out / name, whole / name)
    return done


def run_whole(command: list[str]) -> float:
    """Seconds that it takes without a kill."""
    log, began = Path(command[-1]).with_suffix(".log"), time.monotonic()
    assert finish(command, log) == 0, log.read_text()[-3000:]
    return time.monotonic() - began
