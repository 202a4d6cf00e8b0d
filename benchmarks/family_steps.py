"""Runs the three steps on a tiny checkpoint, in this process, and examines what they save.

Each run is the step's own script with the flags of a user. Two things are replaced: the process
group stays for the next run, and the trained module's logits are kept before it is saved, for
comparison with those of the saved folder.
"""

import contextlib
import functools
import importlib.util
import json
import logging
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from family_checks import difference, load_published, logits_of
from report import ROOT
from safetensors import safe_open

import dschat.distributed as dist
from dschat.config.parser import to_flags
from dschat.rlhf.engine import DeepSpeedRLHFEngine
from dschat.runtime.deepspeed_engine import unwrap
from dschat.supervised import setup

COMMON: dict[str, Any] = {
    "dtype": "fp32",
    "max_steps": 2,
    "save_steps": 0,
    "max_eval_samples": 2,
    "report_to": ["none"],
    "disable_tqdm": True,
    "overwrite_output_dir": True,
    "log_level": "warning",
}
SUPERVISED = COMMON | {
    "max_seq_len": 40,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-3,
}
RLHF = COMMON | {
    "max_steps": 1,
    "max_prompt_seq_len": 24,
    "max_answer_seq_len": 16,
    "per_device_generation_batch_size": 2,
    "num_samples_per_prompt": 2,
    "per_device_training_batch_size": 4,
    "actor_learning_rate": 1e-3,
    "critic_learning_rate": 1e-3,
}
# Column of the table -> the step's script and its flags.
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "SFT": ("step1_sft", SUPERVISED),
    "LoRA": ("step1_sft", SUPERVISED | {"lora_dim": 4}),
    "ZeRO-3": ("step1_sft", SUPERVISED | {"zero_stage": 3}),
    "reward": ("step2_reward", SUPERVISED | {"max_steps": 1}),
    "PPO": ("step3_rlhf", RLHF),
    "GRPO": ("step3_rlhf", RLHF | {"advantage_estimator": "grpo"}),
}
_WORDS = [f"word{number}" for number in range(24)]


def write_data(folder: Path) -> None:
    """Pairs of different lengths, and a reward function."""
    lines = []
    for number in range(12):
        prompt = " ".join(_WORDS[: 3 + number % 7])
        chosen = " ".join(_WORDS[number % 5 : number % 5 + 2 + number])
        row = {
            "prompt": prompt,
            "chosen": chosen,
            "rejected": " ".join(_WORDS[number : number + 4]),
        }
        lines.append(json.dumps(row))
    (folder / "train.jsonl").write_text("\n".join(lines[:8]) + "\n")
    (folder / "eval.jsonl").write_text("\n".join(lines[8:]) + "\n")
    (folder / "rewards.py").write_text(
        "def score(answer_ids, **_):\n    return [float(sum(ids) % 7) for ids in answer_ids]\n"
    )


class Runs:
    """Runs of the steps from one checkpoint, in the folder ``work``."""

    def __init__(self, family: str, checkpoint: Path, work: Path) -> None:
        self.family, self.checkpoint, self.work = family, checkpoint, work
        self._logits: list[torch.Tensor] | None = None

    def run(self, name: str) -> Path:
        """Run one of ``RUNS``; returns the folder of what it trained."""
        step, given = RUNS[name]
        out = self.work / name
        if step == "step3_rlhf":
            given = given | {"actor_model_name_or_path": self.checkpoint}
        else:
            given = given | {"model_name_or_path": self.checkpoint}
        if name == "PPO":
            given |= {"critic_model_name_or_path": self.work / "reward"}
        if name == "GRPO":
            given |= {"reward_fn": [f"{self.work / 'rewards.py'}:score"]}
        files = {"data_path": [self.work / "train.jsonl"]}
        files |= {"eval_data_path": [self.work / "eval.jsonl"]}
        words = to_flags(given | files | {"output_dir": out})
        self._logits = None
        with (
            mock.patch.object(sys, "argv", [f"{step}/main.py", *words]),
            mock.patch.object(dist, "shutdown", return_value=None),
            mock.patch.object(setup, "save", self._keeping(setup.save)),
            mock.patch.object(DeepSpeedRLHFEngine, "save", self._keeping(DeepSpeedRLHFEngine.save)),
            _quiet(),
        ):
            script(step).main()
        return out / "actor" if step == "step3_rlhf" else out

    def _keeping(self, save):
        """``save``, after the logits of what it saves have been kept."""

        @functools.wraps(save)
        def kept(trained: Any, *args: Any, **kwargs: Any) -> None:
            module = unwrap(getattr(trained, "actor", trained))
            if hasattr(module, "score"):
                self._logits = None
            else:
                self._logits = logits_of(module)
            save(trained, *args, **kwargs)

        return kept

    def rlhf_gap(self, name: str) -> float:
        """Run step 3; the larger of its actor's `reload_gap` and ``rollout/logprob_gap``."""
        text = (self.run(name).parent / "metrics.jsonl").read_text()
        lines = [json.loads(line) for line in text.splitlines()]
        gaps = [line["rollout/logprob_gap"] for line in lines if "rollout/logprob_gap" in line]
        return max(self.reload_gap(f"{name}/actor"), *gaps)

    def reload_gap(self, saved: str) -> float:
        """Gap of logits between the module just saved and what transformers loads from ``saved``.

        Raises:
            ValueError: transformers finds missing or unexpected weights.
        """
        assert self._logits is not None
        return difference(logits_of(load_published(self.family, self.work / saved)), self._logits)

    def name_differences(self, name: str) -> str:
        """Tensors, with shapes, of the saved folder or the checkpoint that the other lacks."""
        before, after = stored(self.checkpoint), stored(self.work / name)
        differ = sorted(f"{n} {s}" for n, s in before.items() ^ after.items())
        return f"{name}: {len(differ)} differ, {differ[0]}" if differ else "ok"


def stored(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in a folder's safetensors."""
    found = {}
    for file in sorted(folder.glob("model*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            names = opened.keys()
            found |= {n: tuple(opened.get_slice(n).get_shape()) for n in names}
    return found


@functools.cache
def script(step: str) -> ModuleType:
    """The module of a step's ``main.py``."""
    spec = importlib.util.spec_from_file_location(step, ROOT / step / "main.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _quiet():
    """Without what the step and its libraries print; the logger is as before afterwards."""
    logger = logging.getLogger("dschat")
    before = list(logger.handlers), logger.level, logger.propagate
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        try:
            yield
        finally:
            logger.handlers[:], logger.level, logger.propagate = before
