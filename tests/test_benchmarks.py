"""Each benchmark runs on tiny models and prints lines with the fields that pages quote.

`benchmarks/gpu.py` checks itself: a step that reads other bytes than its floor says, log-probs that
differ from the module's, or a kernel with wrong results end it. Its published floors are computed
by hand here.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import forked
import pytest
import torch

from dschat.builtin.tiny_model import resolve_model
from dschat.config.parser import to_flags

ROOT = Path(__file__).resolve().parents[1]


def run_script(name, *flags, cwd=ROOT):
    command = [sys.executable, str(ROOT / "benchmarks" / name), *flags]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=500)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


# -- gpu.py ----------------------------------------------------------------------------------------

# opt-tiny, counted by hand. A layer: q, k, v and output 4 x (32 x 32 + 32), the MLP 2 x 32 x 64 +
# 64 + 32, two norms of 2 x 32. Besides: the last norm, and the tied head of 256 tokens.
LAYER = 4 * (32 * 32 + 32) + 2 * 32 * 64 + 64 + 32 + 2 * 2 * 32
STEP_BYTES = 2 * (2 * LAYER + 2 * 32 + 256 * 32 + 4 * 2 * 32)  # rows of both embeddings: 4 tokens
ALL_BYTES = 2 * (2 * LAYER + 2 * 32 + 256 * 32 + (64 + 2) * 32)
KV_BYTES = 2 * 2 * 32 * 2  # of a token: keys and values of 2 layers


def dry(*flags):
    done = forked.run("benchmarks/gpu.py", "--dry", *flags)
    assert done.code == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_counts_by_hand():
    """The fourth token: an eager step reads 9 keys of a sequence, a captured one its whole page."""
    sides = ["A", "layout=zero_copy"]
    lines = dry("--tiny", "--cases", "opt-1.3b", "--sides", *sides)
    assert [line["side"] for line in lines] == sides
    decode = 3 * STEP_BYTES + 4 * (7 + 8 + 9) * KV_BYTES
    for line, kv_tokens, refresh in zip(lines, (9, 10), (ALL_BYTES, 0), strict=True):
        assert line["step_weights_bytes"] == line["floor_step_weights_bytes"] == STEP_BYTES
        assert line["step_kv_bytes"] == 4 * kv_tokens * KV_BYTES
        assert line["refresh_bytes"] == refresh
        assert (line["operators_captured"] > 0) == (line["side"] != "A")
        assert (line["host_reads"] + line["blocking_copies"] > 0) == (line["side"] == "A")
        floor = line["floor_ms_h100"]
        assert floor["rollout"] == pytest.approx((STEP_BYTES + decode) / 3.0e9, rel=1e-2)


def test_kernels_by_hand():
    command = ["--cases", "kernels", "--kernels", "attention", "up"]
    lines = dry(*command)
    models = ["opt-1.3b", "gpt2", "llama-7b"]
    expected = [(kernel, model) for model in models for kernel in ("up", "attention")]
    expected.append(("attention", "llama3-8b"))
    assert [(x["kernel"], x["model"]) for x in lines] == expected
    line = lines[4]  # Llama's gate and up
    assert line["shape"] == {"rows": 32, "outputs": 2 * 11008, "inputs": 4096}
    assert line["bytes"] == 2 * 2 * 11008 * 4096
    assert line["floor_us_h200"] == pytest.approx(line["bytes"] / 4.3e6, rel=1e-3)
    assert lines[6]["bytes"] == 2 * 64 * (512 + 256) * 2 * 8 * 128  # Llama 3's 8 key-value heads


# The sizes that the models were published with, without the tables that a step reads rows of:
# Llama's embedding (its head is another matrix), OPT's positions.
@pytest.mark.parametrize(
    ("name", "rows", "expected", "per_token"),
    [
        ("llama-7b", 64, 2 * (6_738_415_616 - 32_000 * 4096 + 64 * 4096), 512 * 1024),
        ("opt-1.3b", 8, 2 * (1_315_758_080 - 2050 * 2048 + 8 * 2 * 2048), 2 * 24 * 2048 * 2),
        ("gpt2", 1, 2 * (124_439_808 - 1024 * 768 + 2 * 768), 2 * 12 * 768 * 2),
    ],
)
def test_the_floors_of_the_page(name, rows, expected, per_token):
    """Of docs/lab/gpu.md: bytes of weights a step, and floors at 4.3 and at 3.0 TB/s."""
    from gpu_cases import CASES
    from gpu_floor import Rates, floor_ms, kv_bytes_per_token, weight_bytes
    from rollout_workloads import MODELS

    config, case = MODELS[name](), CASES[name].rollout
    assert case.prompts == rows
    assert weight_bytes(config, rows, torch.bfloat16) == expected
    assert kv_bytes_per_token(config, torch.bfloat16) == per_token
    lines = (ROOT / "docs" / "lab" / "gpu.md").read_text().splitlines()
    (row,) = (x for x in lines if re.match(rf"\| `{name}` .* [\d.,]+ ms \|$", x) and " GB " in x)
    gigabytes, *cells = [cell.strip() for cell in row.strip("|").split("|")][-3:]
    assert gigabytes == f"{expected / 1e9:.3g} GB"
    for cell, bandwidth in zip(cells, (4.3e12, 3.0e12), strict=True):
        floor = floor_ms(config, case, torch.bfloat16, Rates(bandwidth))["rollout"]
        assert float(re.sub("[, ms]", "", cell)) == pytest.approx(floor, rel=5e-3)


# -- gpu.py, kernels one by one --------------------------------------------------------------------


# -- rollout.py ------------------------------------------------------------------------------------


# -- iteration.py; test_padded_losses.py compares what its sides compute ---------------------------


@pytest.mark.slow
def test_iteration(tmp_path):
    """One process, two processes, and a step without rollouts."""
    flags = ["--rounds", "2", "--cases", "ppo", "zero3", "dpo", "--sides", "dschat"]
    lines, _ = run_script("iteration.py", "--tiny", *flags, "deepspeed-chat", cwd=tmp_path)
    assert [(line["case"], line["side"], line["zero_stage"]) for line in lines] == [
        ("ppo", "dschat", 2),
        ("ppo", "deepspeed-chat", 2),
        ("zero3", "dschat", 3),
        ("zero3", "dschat", 2),
        ("dpo", "dschat", 2),
        ("dpo", "deepspeed-chat", 2),
    ]
    for line in lines:
        assert line["iteration_s"]["min"] > 0
        assert line["peak_gib"] >= line["loaded_gib"] > 0
    for ours, theirs in (lines[:2], lines[2:4], lines[4:]):
        for mine, other in zip(ours["losses"], theirs["losses"], strict=True):
            assert mine == pytest.approx(other, rel=1e-4, abs=1e-4)


# -- learning.py -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_learning(tmp_path):
    """Without TRL."""
    flags = {
        "sides": "dschat",
        "seeds": 1,
        "max_steps": 2,
        "snapshot_every": 1,
        "eval_samples": 1,
        "per_device_generation_batch_size": 4,
        "per_device_training_batch_size": 8,
        "output_dir": tmp_path,
        "sft_model": resolve_model("builtin/tiny"),
    }
    ((line,), _) = run_script("learning.py", *to_flags(flags))
    samples, seconds, accuracies = zip(*line["curve"], strict=True)
    per_rollout = 4 * line["settings"]["num_samples_per_prompt"]
    assert samples == (0, per_rollout, 2 * per_rollout)
    assert 0 == seconds[0] < seconds[1] < seconds[2]
    assert accuracies[0] < 0.02  # random weights may generate a number, rarely the right one
    assert not list(tmp_path.rglob("after_*"))
