"""Compares the memory estimate with measured peaks: steps 1 and 3 on a CPU, three sizes.

    python benchmarks/plan_against_peaks.py
    python benchmarks/plan_against_peaks.py --sizes llama-22m --steps 3

Each case runs the script of a step for two optimizer steps or iterations, in its own process with
one thread, on random weights and texts that fill every length. Measured: its peak resident set
(VmHWM) without the check of what was saved, minus that of the same command on a model with 20
thousand weights, which is Python, the libraries and the data. Estimated: the peak of the estimate,
minus its share for libraries. One JSON line per case; `off` is estimated / measured - 1.

Freed blocks that glibc retains count on both sides. Allocator settings are those of every run
(`dschat/startup/performance.py`), without MALLOC_* variables.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
THREADS = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}

Sizes = dict[str, Any]


def llama(hidden: int, inner: int, layers: int, heads: int, vocab: int, tied: bool = True) -> Sizes:
    return {
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "tie_word_embeddings": tied,
    }


def opt(hidden: int, layers: int, heads: int, vocab: int) -> Sizes:
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
    "llama-22m": llama(448, 1216, 6, 7, 8192, tied=False),
    "opt-60m": opt(640, 8, 10, 32000),
    "opt-125m": opt(768, 12, 12, 50272),
}
NEGLIGIBLE = llama(16, 32, 1, 1, 1024)
_WORDS = ("Zubar", "Mola", "red", "soup", "Tanek", "Brill", "blue", "rice", "people", "city")
# Runs a script and prints the peak of its own process (VmHWM), without child processes such as a
# compiler, and without the check of a saved model: that maps the file, whose pages the kernel takes
# back where memory is short.
_RUNNER = """
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
PROMPT_LEN = ANSWER_LEN = 64
STEP1 = {
    "max_seq_len": PROMPT_LEN + ANSWER_LEN,
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
}
STEP3 = {
    "max_prompt_seq_len": PROMPT_LEN,
    "max_answer_seq_len": ANSWER_LEN,
    "min_answer_seq_len": ANSWER_LEN,
    "per_device_generation_batch_size": 8,
    "per_device_training_batch_size": 4,
    "eval_batch_size": 4,
    "enable_ema": True,
}
COMMON = {"max_eval_samples": 4, "report_to": ["none"], "disable_tqdm": True}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--steps", nargs="+", type=int, choices=(1, 3), default=[1, 3])
    args = parser.parse_args()

    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed logs its choice to stdout
    import torch
    from report import environment

    about = environment(torch.device("cpu")) | {"threads": 1}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_texts(work)
        for step in args.steps:
            save_models(work / "negligible", NEGLIGIBLE)
            baseline = measured_peak(work, "negligible", step)
            for size in args.sizes:
                save_models(work / size, SIZES[size])
                line = {"benchmark": "plan_against_peaks", "case": size, "step": step, **about}
                line |= compare(work, size, step, baseline)
                print(json.dumps(line), flush=True)


def compare(work: Path, size: str, step: int, baseline: int) -> dict:
    """The estimated and the measured peak, both in MiB and without the libraries."""
    estimated, mode = estimated_peak(work, size, step)
    measured = measured_peak(work, size, step) - baseline
    return {
        "planned_mib": round(estimated / 2**20),
        "measured_mib": round(measured / 2**20),
        "off": round(estimated / measured - 1, 3),
        "fullest": mode,
        "baseline_mib": round(baseline / 2**20),
    }


def fields(work: Path, size: str, step: int) -> dict:
    """The step's fields, for the estimate and the command line."""
    if step == 1:
        return {
            "model_name_or_path": str(work / size / "lm"),
            "data_path": [str(work / "long.jsonl")],
            **STEP1,
        }
    return {
        "actor_model_name_or_path": str(work / size / "lm"),
        "critic_model_name_or_path": str(work / size / "score"),
        "data_path": [str(work / "prompts.jsonl")],
        **STEP3,
    }


def estimated_peak(work: Path, size: str, step: int) -> tuple[int, str]:
    """Bytes without the libraries, and the mode of the peak."""
    from dschat.estimate import PlanRequest
    from dschat.estimate.report import make_estimator

    request = PlanRequest({step: fields(work, size, step)}, num_processes=1, processes_here=1)
    estimate = make_estimator(request)(step)
    peak = estimate.peak
    # All rows are equally long: malloc keeps nothing between blocks.
    others = estimate.device.libraries + peak.items["kept by malloc"]
    return peak.total - others, f"{peak.name} ({peak.moment})"


def measured_peak(work: Path, size: str, step: int) -> int:
    """Peak resident set in bytes of a run of two optimizer steps or iterations."""
    given = fields(work, size, step) | COMMON | {"max_steps": 2}
    printed = run_step(work, size, step, given, ["-c", _RUNNER])
    return int(re.search(r"^peak (\d+) KiB$", printed, re.MULTILINE)[1]) * 1024


def run_step(work: Path, size: str, step: int, given: Sizes, runner: Sequence[str]) -> str:
    """What a step with the fields ``given`` prints to stderr; with one thread, on the CPU.

    ``runner``: words of Python's command line before the script.
    """
    from dschat.config.parser import to_flags

    script = ROOT / {1: "step1_sft", 3: "step3_rlhf"}[step] / "main.py"
    given = given | {"output_dir": str(work / "out"), "overwrite_output_dir": True}
    command = [sys.executable, *runner, str(script), *to_flags(given)]
    done = subprocess.run(command, env=os.environ | THREADS, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"step {step} on {size} failed:\n{done.stderr}")
    return done.stderr


def save_models(folder: Path, sizes: dict) -> None:
    """Save a causal LM and a reward model with random weights and the built-in tokenizer."""
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
    )

    from dschat.builtin.tiny_model import tiny_tokenizer

    if folder.exists():
        return
    tokenizer = tiny_tokenizer()
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    ids["pad_token_id"] = tokenizer.pad_token_id
    made = {"lm": AutoModelForCausalLM, "score": AutoModelForSequenceClassification}
    for name, auto in made.items():
        labels = {"num_labels": 1} if name == "score" else {}
        positions = {"max_position_embeddings": 512}
        config = AutoConfig.for_model(**sizes, **ids, **positions, **labels)
        auto.from_config(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def write_texts(folder: Path) -> None:
    """Write texts longer than step 1's limit, and prompts just under step 3's limit."""
    draw = random.Random(0)

    def words(count: int) -> str:
        return " ".join(draw.choice(_WORDS) for _ in range(count))

    for name, rows, prompt_words in (("long", 64, 400), ("prompts", 256, PROMPT_LEN - 4)):
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            for _ in range(rows):
                chosen = words(60)
                row = {"prompt": words(prompt_words), "chosen": chosen, "rejected": chosen[::-1]}
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
