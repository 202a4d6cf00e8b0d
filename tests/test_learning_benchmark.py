"""Settings, clock, curves and ratios of `benchmarks/learning.py`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dschat.builtin.tiny_model import resolve_model
from dschat.config import RLHFConfig, UserError
from dschat.config.parser import to_flags

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module", autouse=True)
def on_path():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield
    sys.path.remove(str(ROOT / "benchmarks"))


def config(**knobs):
    knobs = {"advantage_estimator": "grpo", "kl_coef": 0.0, "num_samples_per_prompt": 8} | knobs
    return RLHFConfig(actor_model_name_or_path="a", reward_fn=["exact_match"], **knobs)


# -- settings --------------------------------------------------------------------------------------


def test_trl_takes_the_same_steps_with_the_same_number_of_answers():
    from learning_settings import trl_settings

    ours = config(
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
        ({"cliprange_high": 0.28}, {"epsilon": 0.2, "epsilon_high": 0.28}),
        ({"kl_coef": 0.04}, {"beta": 0.04, "use_bias_correction_kl": False}),
        ({"adam_betas": [0.9, 0.99]}, {"adam_beta1": 0.9, "adam_beta2": 0.99}),
        ({"min_p": 0.0}, {"min_p": None}),
    ],
)
def test_settings_by_trls_names(knobs, theirs):
    from learning_settings import check_comparable, trl_settings

    check_comparable(config(**knobs))
    assert trl_settings(config(**knobs)).items() >= theirs.items()


def test_only_speed_differs_from_trls_defaults():
    from learning_settings import trl_settings

    fast, plain = trl_settings(config()), trl_settings(config(), for_speed=False)
    assert {name for name in fast if name not in plain} == {"gradient_checkpointing", "bf16"}
    assert plain.items() <= fast.items()


@pytest.mark.parametrize(
    ("knobs", "flag"),
    [
        ({"advantage_estimator": "rloo"}, "--advantage_estimator rloo"),
        ({"policy_loss": "cispo"}, "--policy_loss cispo"),
        ({"kl_coef": 0.1, "kl_in_loss": False}, "--kl_coef"),
        ({"kl_coef": 0.1, "kl_estimator": "k2"}, "--kl_coef"),
        ({"dual_clip": 3.0}, "--dual_clip 3.0"),
        ({"dynamic_sampling": True}, "--dynamic_sampling"),
    ],
)
def test_settings_without_an_equivalent_in_trl_are_named(knobs, flag):
    from learning_settings import check_comparable

    with pytest.raises(UserError, match=flag):
        check_comparable(config(**knobs))


# -- the record ------------------------------------------------------------------------------------


def test_the_clock_stops_while_weights_are_saved(tmp_path, monkeypatch):
    import learning_task
    import torch

    now = [100.0]
    monkeypatch.setattr(learning_task.time, "perf_counter", lambda: now[0])

    def slow_weights():
        now[0] += 50.0
        return [("w", torch.ones(2))]

    record = learning_task.Recorder(tmp_path, snapshot_every=2)
    record.start()
    for _ in range(3):
        now[0] += 10.0
        record.step(4.0, 1.0, slow_weights)
    record.finish([])
    rows = json.loads((tmp_path / learning_task.RESULT).read_text())["rows"]
    assert rows == [{"step": 10.0, "generate": 4.0, "score": 1.0, "train": 5.0}] * 3
    saved = [learning_task.snapshot_path(tmp_path, n).exists() for n in (1, 2, 3)]
    assert saved == [False, True, False]


def test_exact_match():
    from learning_task import exact_match

    answers = ["85", " 85 ", "850", "", "8 5", "3,85"]
    assert exact_match(answers, ["85"] * 6) == [1.0, 1.0, 0.0, 0.0, 0.0, 1.0]


# -- curves ----------------------------------------------------------------------------------------

START = (0, 0.0, 0.2)


@pytest.mark.parametrize(
    ("points", "reached"),
    [
        # three quarters of the way from 0.5 to 0.9
        ([START, (100, 10.0, 0.5), (200, 30.0, 0.9)], (175.0, 25.0)),
        ([START, (100, 10.0, 0.8), (200, 20.0, 0.3)], (100.0, 10.0)),  # the first time counts
        ([START, (100, 10.0, 0.79)], None),
        ([(0, 0.0, 0.85), (100, 10.0, 0.9)], (0, 0.0)),
    ],
)
def test_first_reach(points, reached):
    from learning_curves import first_reach

    assert first_reach(points, 0.8) == (reached and pytest.approx(reached))


def run(step_s, *points):
    from learning_curves import Run

    row = {"step": step_s, "generate": step_s / 2, "score": step_s / 4, "train": step_s / 4}
    return Run([START, *points], [row, row], {})


def test_ratios_are_of_one_seed():
    from learning_curves import ratio

    baseline = [run(1.0, (100, 10.0, 0.8)), run(2.0, (200, 20.0, 0.8))]
    runs = [run(3.0, (100, 30.0, 0.8)), run(4.0, (100, 40.0, 0.8))]
    ratios = ratio(runs, baseline, 0.8)
    assert ratios["step"] == {"median": 2.5, "min": 2.0, "max": 3.0}
    assert ratios["samples_to_target"] == {"median": 0.75, "min": 0.5, "max": 1.0}
    assert ratios["seconds_to_target"] == {"median": 2.5, "min": 2.0, "max": 3.0}


def test_a_seed_that_misses_the_target_leaves_no_median():
    from learning_curves import ratio, summary

    runs = [run(1.0, (100, 10.0, 0.8)), run(1.0, (100, 12.0, 0.6)), run(1.0, (100, 14.0, 0.7))]
    line = summary(runs, 0.8)
    assert line["target"] == {"accuracy": 0.8, "samples": None, "seconds": None}
    assert line["curve"] == [[0, 0.0, 0.2], [100, 12.0, 0.7]]
    assert line["final_accuracy"] == {"median": 0.7, "min": 0.6, "max": 0.8}
    assert ratio(runs, runs, 0.8)["seconds_to_target"] is None


@pytest.mark.slow
def test_dschat_alone(tmp_path):
    """The complete benchmark with a tiny model, without TRL."""
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
    command = [sys.executable, str(ROOT / "benchmarks" / "learning.py"), *to_flags(flags)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    (line,) = map(json.loads, done.stdout.splitlines())
    samples, seconds, accuracies = zip(*line["curve"], strict=True)
    per_rollout = 4 * line["settings"]["num_samples_per_prompt"]
    assert samples == (0, per_rollout, 2 * per_rollout)
    assert 0 == seconds[0] < seconds[1] < seconds[2]
    assert accuracies[0] < 0.02  # random weights may generate a number, rarely the right one
    assert not list(tmp_path.rglob("after_*"))
