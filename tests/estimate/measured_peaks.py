"""Peak memory of a step's script on a CPU, without what Python, libraries and data take.

Each run is two optimizer steps or iterations in a process with one thread, on random weights and
texts that fill every length. Measured is its peak resident set (VmHWM), minus that of the same
command on a model of 20 thousand weights. Freed blocks that glibc retains count.
"""

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from dschat.config.parser import to_flags
from dschat.estimate import PlanRequest
from dschat.estimate.report import make_estimator

ROOT = Path(__file__).resolve().parents[2]
THREADS = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}


def llama(hidden: int, inner: int, layers: int, heads: int, vocab: int, tied: bool = True) -> dict:
    return {
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "tie_word_embeddings": tied,
    }


def opt(hidden: int, layers: int, heads: int, vocab: int) -> dict:
    return {
        "model_type": "opt",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "word_embed_proj_dim": hidden,
        "ffn_dim": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }


SIZES = {
    "negligible": llama(16, 32, 1, 1, 1024),
    "llama-22m": llama(448, 1216, 6, 7, 8192, tied=False),
    "opt-60m": opt(640, 8, 10, 32000),
    "opt-125m": opt(768, 12, 12, 50272),
}
# Without child processes such as a compiler, and without the check of a saved model: that maps the
# file, whose pages the kernel takes back where memory is short.
RUNNER = """
import re, runpy, sys
from dschat.checkpoint import hf_export
hf_export.check_saved = lambda *_: None
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    kib = re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]
    sys.stderr.write(f"\\npeak {kib} KiB\\n")
"""
LEN = 64  # of prompts, and of answers
SCRIPTS = {1: "step1_sft", 3: "step3_rlhf"}
STEP1 = {"max_seq_len": 2 * LEN}
STEP1 |= dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), 4)
STEP3 = {"per_device_generation_batch_size": 8, "per_device_training_batch_size": 4}
STEP3 |= dict.fromkeys(("max_prompt_seq_len", "max_answer_seq_len", "min_answer_seq_len"), LEN)
STEP3 |= {"eval_batch_size": 4, "enable_ema": True}


class Peaks:
    """Estimated and measured peaks; models and texts lie in the folder ``work``."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self._baselines: dict[int, int] = {}
        draw = random.Random(0)

        def words(count: int) -> str:
            names = ("Zubar", "Mola", "red", "soup", "Tanek", "Brill", "blue", "rice", "people")
            return " ".join(draw.choice(names) for _ in range(count))

        # Texts longer than step 1's limit, and prompts just under step 3's.
        for step, rows, length in ((1, 64, 400), (3, 256, LEN - 4)):
            with (work / f"{step}.jsonl").open("w") as file:
                for _ in range(rows):
                    chosen = words(60)
                    row = {"prompt": words(length), "chosen": chosen, "rejected": chosen[::-1]}
                    file.write(json.dumps(row) + "\n")

    def estimated(self, size: str, step: int) -> int:
        """Bytes without the libraries. All rows are equally long: malloc keeps nothing between
        blocks.
        """
        request = PlanRequest({step: self._fields(size, step)}, num_processes=1, processes_here=1)
        done = make_estimator(request)(step)
        return done.peak.total - done.device.libraries - done.peak.items["kept by malloc"]

    def measured(self, size: str, step: int) -> int:
        """Bytes without the libraries."""
        if step not in self._baselines:
            self._baselines[step] = self._run("negligible", step)
        return self._run(size, step) - self._baselines[step]

    def _fields(self, size: str, step: int) -> dict[str, Any]:
        folder = self._models(size)
        data = {"data_path": [str(self.work / f"{step}.jsonl")]}
        if step == 1:
            return STEP1 | data | {"model_name_or_path": str(folder / "lm")}
        models = {"actor_model_name_or_path": str(folder / "lm")}
        return STEP3 | data | models | {"critic_model_name_or_path": str(folder / "score")}

    def _models(self, size: str) -> Path:
        """A causal LM and a reward model with random weights and the built-in tokenizer."""
        from transformers import (
            AutoConfig,
            AutoModelForCausalLM,
            AutoModelForSequenceClassification,
        )

        from dschat.builtin.tiny_model import tiny_tokenizer

        folder = self.work / size
        if folder.exists():
            return folder
        tokenizer = tiny_tokenizer()
        ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
        ids |= {"pad_token_id": tokenizer.pad_token_id, "max_position_embeddings": 512}
        made = {"lm": AutoModelForCausalLM, "score": AutoModelForSequenceClassification}
        for name, auto in made.items():
            labels = {"num_labels": 1} if name == "score" else {}
            config = AutoConfig.for_model(**SIZES[size], **ids, **labels)
            auto.from_config(config).save_pretrained(folder / name)
            tokenizer.save_pretrained(folder / name)
        return folder

    def _run(self, size: str, step: int) -> int:
        """The peak resident set of a run, in bytes."""
        given = {"max_eval_samples": 4, "report_to": ["none"], "disable_tqdm": True, "max_steps": 2}
        given |= {"output_dir": str(self.work / "out"), "overwrite_output_dir": True}
        words = to_flags(self._fields(size, step) | given)
        command = [sys.executable, "-c", RUNNER, str(ROOT / SCRIPTS[step] / "main.py"), *words]
        done = subprocess.run(command, env=os.environ | THREADS, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return int(re.search(r"^peak (\d+) KiB$", done.stderr, re.MULTILINE)[1]) * 1024
