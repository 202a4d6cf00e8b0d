"""Each benchmark runs on tiny models and prints lines with the fields that pages quote.

`benchmarks/gpu.py` checks itself: log-probs that differ from the module's, or a kernel with wrong
results end it. Its published floors are computed by hand here, and so is what is compared with TRL.
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
from dschat.config import RLHFConfig, UserError
from dschat.config.parser import to_flags

ROOT = Path(__file__).resolve().parents[1]
TINY = ("opt-tiny", "gpt2-tiny", "llama-tiny", "llama3-tiny")


def run_script(name, *flags, cwd=ROOT):
    command = [sys.executable, str(ROOT / "benchmarks" / name), *flags]
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=500)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


# -- gpu.py ----------------------------------------------------------------------------------------


def dry(*flags):
    done = forked.run("benchmarks/gpu.py", "--dry", *flags)
    assert done.code == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


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


def test_gpu_dry():
    lines = dry("--tiny")
    rollouts = {line["case"]: line for line in lines if line["case"] != "kernels"}
    families = ["gemma3-1b", "qwen3-moe-3b", "gpt-oss-3b", "qwen3.5-2b"]
    names = ["opt-1.3b", "gpt2", "llama-7b", *families, "refresh-7b", "opt-13b-lora"]
    assert list(rollouts) == names
    assert len(lines) - len(rollouts) == 3 * 10 + 1
    line = rollouts["opt-1.3b"]  # three steps of four sequences with 6 tokens of prompt
    tokens = 4 * (7 + 8 + 9)
    assert line["floor_kv_decode_bytes"] == tokens * line["floor_kv_per_token_bytes"]


@pytest.mark.slow
def test_gpu_on_a_cpu(capsys):
    """Times mean nothing there: the fields, what moves in a refresh, what is skipped."""
    import gpu_sides
    from gpu_cases import CASES, OTHERS, parse_side
    from gpu_floor import card_rates

    texts = ["graphs=off", "graphs=off,layout=zero_copy", "lag=0"]
    sides = {text: parse_side(text) for text in texts}
    rates = card_rates(torch.device("cpu"), 2**20, (64,))
    lines = list(gpu_sides.measure("opt", CASES["opt-1.3b"].tiny(), sides, OTHERS, 1, rates))
    assert [(x["zero_stage"], x["side"]) for x in lines] == [
        *((2, side) for side in [*texts, "generate"]),
        *((3, side) for side in texts),
    ]
    assert len(re.findall(r"ZeRO-\d: [\w-]+ skipped", capsys.readouterr().err)) == 1 + 2
    for line in lines:
        floor, median = line["floor_ms"]["rollout"], line["rollout_ms"]["median"]
        assert line["share_of_floor"]["rollout"] == pytest.approx(floor / median, rel=1e-3)
        if line["side"] != "generate":
            moves = "zero_copy" not in line["side"]
            assert (line["refresh_bytes"]["median"] > 0) == moves
            assert line["logprob_gap"] < 1e-4
    phases = ["load", "allocate the cache", "rollout 0", "step 0", "rollout 1", "step 1"]
    assert list(gpu_sides.memory(CASES["opt-13b-lora"].tiny())["phases"]) == phases


# -- rollout.py ------------------------------------------------------------------------------------


def test_rollout_reuse():
    """Prefill of common pages and rows of equal answers, by hand; every case reports its sides."""
    import rollout_reuse as reuse
    from rollout_sides import make_module
    from rollout_workloads import Case

    device = torch.device("cpu")
    module = make_module(Case("opt-tiny", 0, 0, 0, 0), device, torch.float32)

    def medians(name, **setting):
        found = reuse.compare(name, reuse.Setting(module, device, **setting), 1)
        return [{k: v["median"] for k, v in found[side].items()} for side in ("with", "without")]

    # A tenth of 512 + 32 tokens, of which 32 fill the only common page.
    computed = [side["prefill_tokens"] for side in medians("prefix", scale=0.1)]
    assert computed == [54 + 63 * (54 - 32), 64 * 54]
    # Greedily, 3 x 8 answers of 13 tokens: 12 steps of 3 rows instead of 24.
    assert [side["rows"] for side in medians("alike", scale=0.2, rows=3)] == [36, 288]
    assert set(medians("chat", scale=0.05)[0]) == {f"turn{number}_s" for number in range(1, 6)}
    assert medians("partial", scale=0.1, rows=4)[0]["answer_s"] > 0


@pytest.mark.slow
def test_rollout():
    """Our decoder, transformers' module as the decoder, and `generate`, on every kind of case."""
    cases = ["even", "even-samples", "uneven", "shared", "ragged"]
    flags = ["--model", "llama-tiny", "--sides", "engine", "module", "generate", "--rounds", "1"]
    lines, _ = run_script("rollout.py", "--cases", *cases, *flags)
    assert [line["case"] for line in lines] == cases
    for line in lines:
        assert set(line["ratio"]) == {"engine", "module"}
        assert set(line["tokens_per_s"]) == {*line["ratio"], "generate"}
    computed = {s: f["prefill_tokens"] for s, f in lines[1]["facts"].items()}
    assert computed == {"engine": 8 * 32, "module": 8 * 32, "generate": 4 * 8 * 32}


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


def settings(**knobs):
    knobs = {"advantage_estimator": "grpo", "kl_coef": 0.0, "num_samples_per_prompt": 8} | knobs
    return RLHFConfig(actor_model_name_or_path="a", reward_fn=["exact_match"], **knobs)


def test_trl_takes_the_same_steps_with_the_same_number_of_answers():
    from learning_settings import trl_settings

    ours = settings(
        max_steps=10,
        per_device_generation_batch_size=64,  # x 8 answers
        per_device_training_batch_size=64,
        gradient_accumulation_steps=2,  # so four mini-batches
        ppo_epochs=2,
    )
    theirs = trl_settings(ours)
    # TRL counts micro-batches between generations, and optimizer steps over all.
    assert theirs["steps_per_generation"] * theirs["per_device_train_batch_size"] == 64 * 8
    assert theirs["max_steps"] == 10 * 4 * 2
    assert (theirs["gradient_accumulation_steps"], theirs["num_iterations"]) == (2, 2)


@pytest.mark.parametrize(
    ("knobs", "theirs"),
    [
        ({}, {"loss_type": "dapo", "scale_rewards": "group", "epsilon": 0.2, "epsilon_high": 0.2}),
        ({"advantage_estimator": "dr_grpo"}, {"loss_type": "dr_grpo", "scale_rewards": "none"}),
        ({"loss_aggregation": "sequence"}, {"loss_type": "grpo"}),
        ({"cliprange": [0.2, 0.28]}, {"epsilon": 0.2, "epsilon_high": 0.28}),
        ({"kl_coef": 0.04}, {"beta": 0.04, "use_bias_correction_kl": False}),
        ({"adam_betas": [0.9, 0.99]}, {"adam_beta1": 0.9, "adam_beta2": 0.99}),
        ({"min_p": 0.0}, {"min_p": None}),
        ({"advantage_estimator": "rloo"}, "--advantage_estimator rloo"),
        ({"policy_loss": "cispo"}, "--policy_loss cispo"),
        ({"kl_coef": 0.1, "kl_estimator": "k2"}, "--kl_coef"),
    ],
)
def test_settings_by_trls_names(knobs, theirs):
    """Or the flag that TRL has no equivalent of."""
    from learning_settings import check_comparable, trl_settings

    if isinstance(theirs, str):
        with pytest.raises(UserError, match=theirs):
            check_comparable(settings(**knobs))
    else:
        check_comparable(settings(**knobs))
        assert trl_settings(settings(**knobs)).items() >= theirs.items()


def test_ratios_to_the_target_are_of_one_seed():
    from learning_curves import Run, ratio, summary

    def run(step_s, *points):
        row = {"step": step_s, "generate": step_s / 2, "score": step_s / 4, "train": step_s / 4}
        return Run([(0, 0.0, 0.2), *points], [row, row], {})

    baseline = [run(1.0, (100, 10.0, 0.8)), run(2.0, (200, 20.0, 0.8))]
    # Three quarters of the way from 0.5 to 0.9; the first time counts.
    runs = [run(3.0, (100, 10.0, 0.5), (200, 30.0, 0.9)), run(4.0, (100, 40.0, 0.8), (200, 41, 0))]
    ratios = ratio(runs, baseline, 0.8)
    assert ratios["step_s"] == {"median": 2.5, "min": 2.0, "max": 3.0}
    assert ratios["samples_to_target"] == {"median": 1.125, "min": 0.5, "max": 1.75}
    assert ratios["seconds_to_target"] == {"median": 2.25, "min": 2.0, "max": 2.5}
    runs = [run(1.0, (100, 10.0, 0.79)), run(1.0, (100, 10.0, 0.8))]
    assert summary(runs, 0.8)["seconds_to_target"] is None
    assert summary(baseline, 0.8)["samples_to_target"] == {"median": 150, "min": 100, "max": 200}
    assert ratio(runs, runs, 0.8)["seconds_to_target"] is None


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
    per_rollout = 4 * 8  # prompts x the answers of the recipe
    assert samples == (0, per_rollout, 2 * per_rollout)
    assert 0 == seconds[0] < seconds[1] < seconds[2]
    assert accuracies[0] < 0.02  # random weights may generate a number, rarely the right one
    assert not list(tmp_path.rglob("after_*"))


@pytest.mark.slow
def test_agents():
    (line,), _ = run_script("agents.py", "--prompts", "2", "--samples", "2", "--rounds", "1")
    assert line["episodes"] == 4
    assert set(line["seconds"]) == {"environment", "agent"}
    assert line["agent_over_environment"]["median"] > 0
