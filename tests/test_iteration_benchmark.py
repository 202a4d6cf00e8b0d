"""Losses, rows and ratios of `benchmarks/iteration.py`."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module", autouse=True)
def on_path():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield
    sys.path.remove(str(ROOT / "benchmarks"))


# Large steps and narrow ranges: ratios and values are clipped. Not larger: Adam turns a gradient
# that is rounding noise into a full step, and packed rows round otherwise than padded ones.
LARGE_STEPS = {
    "actor_learning_rate": 1e-3,
    "critic_learning_rate": 1e-2,
    "cliprange": 0.01,
    "cliprange_value": 0.01,
}


# -- the same losses on every side -----------------------------------------------------------------


def losses(side, rounds=3):
    return [side.run(number)["losses"] for number in range(rounds)]


def check_equal(ours, theirs):
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(other, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("name", ["ppo", "grpo-prefix"])
def test_rlhf_losses_are_equal(name, tmp_path):
    from iteration_cases import find_case, write_models
    from iteration_deepspeed_chat import DeepSpeedChatRLHF
    from iteration_dschat import RLHFSide

    # Several optimizer steps a rollout: the later ones have ratios other than 1.
    case = dataclasses.replace(find_case(name, tiny=True), micro_batch=2)
    write_models(case, tmp_path)
    sides = (RLHFSide, DeepSpeedChatRLHF)
    ours, theirs = (side(case, tmp_path, 2, **LARGE_STEPS) for side in sides)
    check_equal(losses(ours), losses(theirs))
    clipped = {k: v for k, v in ours.trainer.metrics.items() if k.endswith("clipfrac_avg")}
    assert min(clipped.values()) > 0.02


@pytest.mark.parametrize("name", ["sft", "rm", "dpo"])
def test_supervised_losses_are_equal(name, tmp_path):
    from iteration_cases import find_case, write_models
    from iteration_dschat import SupervisedSide
    from iteration_padded_supervised import PaddedSupervised

    case = find_case(name, tiny=True)
    write_models(case, tmp_path)
    ours = losses(SupervisedSide(case, tmp_path, 2, learning_rate=1e-2))
    for to_longest in (False, True):
        theirs = PaddedSupervised(case, tmp_path, 2, to_longest=to_longest, learning_rate=1e-2)
        check_equal(ours, losses(theirs))
    values = [loss[name] for loss in ours]
    assert max(values) - min(values) > 1e-3  # DPO's first loss is log 2, whatever the sides do


def test_padding_is_masked():
    from iteration_deepspeed_chat import Padded

    batch = Padded.of([[7, 8], [9]], width=3, left=True)
    assert batch.ids.tolist() == [[0, 7, 8], [0, 0, 9]]
    inputs = batch.inputs()
    assert inputs["attention_mask"].tolist() == [[0, 1, 1], [0, 0, 1]]
    assert inputs["position_ids"].tolist() == [[0, 0, 1], [0, 0, 0]]


def test_advantages_by_hand():
    import torch
    from iteration_deepspeed_chat import generalized_advantages, group_advantages

    rewards, values = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.25]])
    advantages, returns = generalized_advantages(rewards, values, gamma=1.0, lam=0.5)
    assert advantages.tolist() == [[-0.25 + 0.5 * 0.75, 0.75]]
    assert returns.tolist() == [[0.625, 1.0]]
    # deviations of 1 and of sqrt(2), divided by n - 1
    grouped = group_advantages(torch.tensor([1.0, 2.0, 3.0, 5.0, 5.0, 5.0]), samples=3)
    assert grouped.tolist() == pytest.approx([-1.0, 0.0, 1.0, 0.0, 0.0, 0.0], abs=1e-5)


# -- cases and figures -----------------------------------------------------------------------------


def test_rows_are_within_the_limits():
    from iteration_cases import CASES, rollout_rows, supervised_rows

    for case in CASES.values():
        if case.needs_gpu:
            continue
        if case.is_rlhf:
            prompts, answers = rollout_rows(case, 1, 0)
            assert len(prompts) * case.samples == len(answers)
            assert max(map(len, prompts)) <= case.max_prompt
            rows = answers
        else:
            rows = supervised_rows(case, 1, 0)
            rows = [row.get("input_ids") or row["chosen_ids"] for row in rows]
        assert max(map(len, rows)) <= case.max_len
        assert len({tuple(row) for row in rows}) == len(rows)


def test_rates_count_real_tokens():
    from iteration_cases import Case, Lengths
    from iteration_counts import count, rates

    case = Case("ppo", "opt-tiny", 4, Lengths(10, 10), Lengths(5, 5), ranks=2)
    seconds = {"generate_s": 2.0, "score_s": 1.0, "train_s": 4.0, "iteration_s": 8.0}
    measured = rates(count(case, 1), seconds)
    assert measured["tokens_per_s"] == {"generate": 20, "score": 120, "train": 30, "iteration": 15}
    assert measured["samples_per_s"] == 1.0
    # forward of one token in the linears: 2 layers x (4 x 32 x 32 + 2 x 32 x 64), 2 FLOPs each;
    # attention: 15 x 16 / 2 pairs x 32 x 2 products x 2 layers, 2 FLOPs each
    layers, attention = 15 * 2 * 2 * (4 * 32 * 32 + 2 * 32 * 64), 120 * 32 * 2 * 2 * 2
    forwards = 2 * layers + 2 * attention + 15 * 2 * 32 * (256 + 1)  # actor and critic
    assert measured["tflops"]["train"] * 1e12 == pytest.approx(3 * 4 * forwards / 4.0)


def test_ratios_are_within_a_round():
    from iteration import ratio

    first = [{"iteration_s": 1.0, "peak_gib": 1.0}, {"iteration_s": 4.0, "peak_gib": 2.0}]
    rounds = [{"iteration_s": 3.0, "peak_gib": 1.0}, {"iteration_s": 4.0, "peak_gib": 1.0}]
    assert ratio(rounds, first) == {
        "iteration_s": {"median": 2.0, "min": 1.0, "max": 3.0},
        "peak_gib": 0.5,
    }


def test_a_gpu_case_is_refused_without_one(monkeypatch):
    import torch
    from iteration import unavailable
    from iteration_cases import CASES

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert unavailable(CASES["openrlhf-7b"]) == "it needs a CUDA device"
    assert unavailable(CASES["ppo"]) == ""


@pytest.mark.slow
def test_the_whole_benchmark(tmp_path):
    """Tiny models: one process, two processes, and a step without rollouts."""
    command = [sys.executable, str(ROOT / "benchmarks" / "iteration.py"), "--tiny"]
    command += ["--rounds", "2", "--cases", "ppo", "zero3", "dpo", "--sides", "dschat"]
    done = subprocess.run(
        [*command, "deepspeed-chat"], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    labels = [(line["case"], line["side"], line["zero_stage"]) for line in lines]
    assert labels == [
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
    for pair in (lines[:2], lines[2:4], lines[4:]):
        check_equal(*(line["losses"] for line in pair))
