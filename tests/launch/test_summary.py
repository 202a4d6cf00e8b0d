"""The summary: numbers from rows of metrics.jsonl, and unknown numbers."""

import json
import math

import pytest
from damages import DAMAGES, LINES

from dschat.launch.summary import format_summary, write_summary

STEP_1 = [{"step": 0, "eval/loss": 4.0}, {"step": 0, "eval/gold": 0.01}, {"step": 1, "loss": 3.0}]
STEP_2 = [
    {"step": 0, "eval/accuracy": 0.5},
    {"step": 1, "accuracy": 0.99},
    {"step": 2, "eval/accuracy": 0.93},
]
STEP_3 = [
    {"step": 0, "eval/gold": 0.4, "eval/kl": 0.0, "eval/score": 0.1},
    {"step": 1, "throughput/generate_tokens_per_s": 100.0, "objective/kl": 3.0},
    {"step": 1, "eval/gold": 0.5, "eval/kl": 2.0},
    {"step": 2, "throughput/generate_tokens_per_s": 900.0, "objective/kl": 5.0},
    {"step": 3, "throughput/generate_tokens_per_s": 300.0, "objective/kl": 9.0},
    {"step": 3, "eval/gold": 0.7, "eval/kl": 6.5, "eval_ema/gold": 0.65, "eval_ema/kl": 4.0},
]

POLICY_ON_PAIRS = [
    {"step": 0, "eval/gold": 0.4},
    {"step": 0, "eval/rewards/accuracies": 0.5},
    {"step": 1, "rewards/accuracies": 0.99},
    {"step": 2, "eval/rewards/accuracies": 0.97},
    {"step": 2, "eval/gold": 0.85},
]


def log(folder, **steps):
    for name, rows in steps.items():
        (folder / name).mkdir(exist_ok=True)
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / name / "metrics.jsonl").write_text(lines)
        (folder / name / "COMPLETE").write_text("")


def test_whole_run(tmp_path):
    """Base model and SFT are measured at step 0; PPO, its EMA and the KL at the end."""
    log(tmp_path, step1_sft=STEP_1, step2_reward=STEP_2, step3_rlhf=STEP_3)
    summary = write_summary(tmp_path, {1: 10.25, 2: 20.0, 3: 30.5})
    assert summary == {
        "rm_accuracy": 0.93,
        "gold_base": 0.01,
        "gold_sft": 0.4,
        "gold_ppo": 0.7,
        "gold_ema": 0.65,
        "kl_per_sequence": 6.5,
        "step1_s": 10.25,
        "step2_s": 20.0,
        "step3_s": 30.5,
        "generate_tokens_per_s": 300.0,  # the median: 900 and 100 are outliers
    }
    written = json.loads((tmp_path / "summary.json").read_text())
    assert written == summary | {"warnings": []}
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["summary.json"]


def test_a_policy_trained_on_pairs(tmp_path):
    """Two steps; metrics of the second are in the folder of the third."""
    log(tmp_path, step1_sft=STEP_1, step3_rlhf=POLICY_ON_PAIRS)
    summary = write_summary(tmp_path, {1: 10.25, 2: 20.0})
    assert summary == {
        "policy_accuracy": 0.97,
        "gold_base": 0.01,
        "gold_sft": 0.4,
        "gold_policy": 0.85,
        "step1_s": 10.25,
        "step2_s": 20.0,
    }
    written = json.loads((tmp_path / "summary.json").read_text())
    assert written == summary | {"warnings": []}
    values = [line.split()[-1] for line in format_summary(summary).splitlines()]
    assert values == ["0.970", "0.010", "0.400", "0.850", "10", "20"]


def test_a_step_that_was_stopped_has_no_result_yet(tmp_path):
    """Its last evaluation is the one before training."""
    log(tmp_path, step1_sft=STEP_1, step3_rlhf=STEP_3[:2])
    (tmp_path / "step3_rlhf/COMPLETE").unlink()
    summary = write_summary(tmp_path, {3: 5.0})
    assert (summary["gold_base"], summary["step3_s"]) == (0.01, 5.0)
    assert {summary[name] for name in ("gold_sft", "gold_ppo", "kl_per_sequence")} == {None}


def test_seconds_of_steps_that_did_not_run_are_kept(tmp_path):
    write_summary(tmp_path, {1: 10.0})
    write_summary(tmp_path, {2: 20.0})
    summary = write_summary(tmp_path, {1: 11.0})
    assert [summary[f"step{n}_s"] for n in (1, 2, 3)] == [11.0, 20.0, None]


def test_seconds_of_a_resumed_step_add_up(tmp_path):
    write_summary(tmp_path, {1: 10.0})
    assert write_summary(tmp_path, {1: 2.5}, resumed=True)["step1_s"] == 12.5
    assert write_summary(tmp_path, {2: 3.0}, resumed=True)["step2_s"] == 3.0
    assert write_summary(tmp_path, {1: 4.0})["step1_s"] == 4.0


@pytest.mark.parametrize("former", ["", "[1]", '{"step1_s": 1'])
def test_a_broken_former_summary_is_replaced(tmp_path, former):
    (tmp_path / "summary.json").write_text(former)
    assert write_summary(tmp_path, {})["step1_s"] is None


def test_unknown_numbers_are_null_and_shown_as_a_dash(tmp_path):
    """User data has no gold score, a run may stop half way, and an empty mean is NaN."""
    log(
        tmp_path,
        step1_sft=[{"step": 0, "eval/loss": 4.0}, {"step": 7, "eval/gold": 0.3}],
        step3_rlhf=[{"step": 0, "eval/score": 0.1, "eval/gold": math.nan}],
    )
    summary = write_summary(tmp_path, {})
    assert set(summary.values()) == {None}
    text = (tmp_path / "summary.json").read_text()
    written = json.loads(text, parse_constant=pytest.fail)  # strict JSON: no NaN
    assert written == summary | {"warnings": []}
    assert all(line.endswith(" -") for line in format_summary(summary).splitlines())


@pytest.mark.parametrize("line", LINES)
def test_a_damaged_row_is_left_out(line, tmp_path):
    log(tmp_path, step2_reward=STEP_2)
    whole = write_summary(tmp_path, {1: 2.0})
    with (tmp_path / "step2_reward" / "metrics.jsonl").open("a", encoding="latin-1") as file:
        file.write(f'{line}\n{{"step": 3, "eval/accuracy": 1{"0" * 400}}}\n')
    assert write_summary(tmp_path, {1: 2.0}) == whole


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_end_no_run(damage, tmp_path):
    """Those of the log and of the summary that there was."""
    log(tmp_path, step3_rlhf=STEP_3)
    write_summary(tmp_path, {1: 2.0})
    DAMAGES[damage](tmp_path / "step3_rlhf/metrics.jsonl")
    if damage != "folder":
        DAMAGES[damage](tmp_path / "summary.json")
    assert "rm_accuracy" in write_summary(tmp_path, {}, resumed=True)
    summary = write_summary(tmp_path, {1: 1.0}, resumed=True)
    assert math.isfinite(summary["step1_s"])
    assert format_summary(summary)


def test_seconds_of_another_kind_are_unknown(tmp_path):
    log(tmp_path, step1_sft=STEP_1)
    (tmp_path / "summary.json").write_text('{"step1_s": "2", "step2_s": true, "step3_s": 4}')
    summary = write_summary(tmp_path, {1: 1.0, 3: 1.0}, resumed=True)
    assert [summary[f"step{n}_s"] for n in (1, 2, 3)] == [1.0, None, 5.0]


def test_table():
    table = format_summary({"gold_ppo": 0.70449, "step3_s": 95.6, "generate_tokens_per_s": 1234.5})
    lines = table.splitlines()
    assert len(lines) == 10
    assert len(set(map(len, lines))) == 1  # right-aligned
    values = [line.split()[-1] for line in lines]
    assert values == ["-", "-", "-", "0.704", "-", "-", "-", "-", "96", "1234"]


def test_what_went_wrong_is_in_the_file(tmp_path):
    """As it was found, of all steps, also of one that ended early: that may be why."""
    log(tmp_path, step2_reward=STEP_2, step3_rlhf=STEP_3)
    (tmp_path / "step3_rlhf/COMPLETE").unlink()
    found = {"step2_reward": ["the loss rises (since step 2)"], "step3_rlhf": ["gone", "far"]}
    for name, texts in found.items():
        rows = "".join(json.dumps({"step": 28, "warning": text}) + "\n" for text in texts)
        (tmp_path / name / "warnings.jsonl").write_text(rows)
    write_summary(tmp_path, {})
    written = json.loads((tmp_path / "summary.json").read_text())
    assert written["warnings"] == sum(found.values(), [])
