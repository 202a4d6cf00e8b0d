"""What the verdict says of saved runs, and of the cases between them; numbers by hand."""

import json
import math
from pathlib import Path

import pytest

from dschat.observability.metrics_log import METRICS, WARNINGS, MetricsLog, whole_rows
from dschat.observability.verdict import verdict

RUNS = Path(__file__).with_name("runs")  # columns of metrics.jsonl
WHERE = "--keep_best saves the best actor."


def saved(name):
    return [json.loads(line) for line in (RUNS / f"{name}.jsonl").open()]


def run_of(name, values, scores=(0.0, 0.0), std=0.5, **last):
    """Evaluations at iterations 0, 10, ...; the score in training at the begin and the end."""
    rows = [{"step": 10 * i, name: value} for i, value in enumerate(values)]
    trained = [{"objective/scores": score, "objective/scores_std": std} for score in scores]
    rows[-1] |= last
    return [*rows, *({"step": 6 + i} | row for i, row in enumerate(trained))]


def test_a_demo_that_learned():
    """0.875 and 0.87 are the same to 300 prompts: sqrt(2 x 0.87 x 0.13 / 300) = 0.027."""
    text, is_bad = verdict(saved("demo"), 300, WHERE)
    assert text.startswith(
        "Held-out answers got better until iteration 30 of 40, and no better after it: eval/gold "
        "0.533 at first, 0.875 at iteration 30, 0.87 at the end (chance: 0.03). --keep_best saves"
    )
    assert text.endswith("KL to the reference: 2.3 nats an answer. Answers cut: 0%.")
    assert not is_bad


def test_a_demo_that_went_on_for_the_score_alone():
    """As it ended on another machine: gold 0.827 at 20, 0.799 at 40, while the score rose by more
    than sqrt(2 / 300) of its spread.
    """
    ends = {0: (0.533, -1.05), 10: (0.8, 5.0), 20: (0.827, 5.8), 30: (0.81, 6.2), 40: (0.799, 6.4)}
    rows = saved("demo")
    for row in rows:
        if "eval/gold" in row:
            row["eval/gold"], row["eval/score"] = ends[row["step"]]
    text, is_bad = verdict(rows, 300, WHERE)
    assert is_bad
    assert (
        "until iteration 20 of 40, and no better after it: eval/gold 0.533 at first, 0.827" in text
    )
    assert (
        "The held-out score rose meanwhile, 5.8 to 6.4: it may be hacked, read the answers." in text
    )
    for row in rows:
        row["eval/score"] = min(row.get("eval/score", 0.0), 6.0)  # 0.2 is chance
    assert not verdict(rows, 300, WHERE)[1]
    for row in rows:
        if row["step"] == 40 and "eval/gold" in row:  # 0.007 is no fall, however the score rises
            row |= {"eval/gold": 0.82, "eval/score": 9.0}
    assert not verdict(rows, 300, WHERE)[1]


def test_a_grpo_run_whose_best_evaluation_is_the_first():
    text, is_bad = verdict(saved("grpo"), 500, WHERE)
    assert is_bad
    assert text == (
        "Held-out answers got worse: eval/pass@1 0.07 at first, 0.046 at the end (chance: 0.02). "
        "The actor it started from is better. Answers cut: 0%."
    )


@pytest.mark.parametrize(
    ("values", "num_held_out", "opening", "is_bad"),
    [
        (
            (0.2, 0.5, 0.9),
            200,
            "got better to the end: eval/pass@1 0.2 at first, 0.9 at the end (",
            False,
        ),
        ((0.2, 0.9, 0.5), 200, "got better until iteration 10 of 20, and worse after it", True),
        ((0.2, 0.9, 0.89), 200, "got better until iteration 10 of 20, and no better", False),
        ((0.5, 0.52, 0.51), 200, "did not get better: eval/pass@1 0.5 at first, 0.52 at", True),
        ((0.5, 0.52, 0.51), 20000, "got better until iteration 10 of 20, and worse after", True),
        ((0.5, 0.3, 0.2), 200, "got worse: eval/pass@1 0.5 at first, 0.2 at the end", True),
        ((0.0, 0.0, 0.0), 200, "did not get better: eval/pass@1 0 at first, 0 at the end", True),
    ],
)
def test_openings(values, num_held_out, opening, is_bad):
    """One standard error of a difference of shares is at most sqrt(2 x 0.25 / n): 0.05 for 200."""
    text, found = verdict(run_of("eval/pass@1", values), num_held_out, WHERE)
    assert text.startswith(f"Held-out answers {opening}")
    assert found == is_bad


def test_only_the_reward_judged():
    """A held-out score that falls while the one in training rises is no better than the reward."""
    spread = 0.5 * math.sqrt(2 / 50)  # 0.1
    text, is_bad = verdict(run_of("eval/score", (1.0, 3.0)), 50, WHERE)
    assert "Only the reward judged them" in text
    assert f"(chance: {spread:.1g})" in text
    assert not is_bad
    trained = (0.0, 0.0, 1.0, 1.0, 1.0, 4.0, 4.0, 4.0)  # at iterations 6 to 13
    text, is_bad = verdict(run_of("eval/score", (1.0, 3.0, 2.0), trained), 50, WHERE)
    assert "The training score rose meanwhile, 1 to 4: it may be hacked" in text
    assert is_bad


def test_a_run_without_two_evaluations_has_none():
    assert verdict([], 8, WHERE) is None
    assert (
        verdict([{"step": 0, "eval/gold": 0.5}, {"step": 1, "objective/scores": 1.0}], 8, "")
        is None
    )
    nulls = [{"step": 0, "eval/score": None}, {"step": 9, "eval/score": None}]
    assert verdict(nulls, 8, WHERE) is None


def test_it_is_stored(tmp_path, caplog):
    """As a warning too where it is bad; by default nothing is written of a run without one."""
    from dschat.config import RLHFConfig

    config = RLHFConfig(output_dir=str(tmp_path), report_to=["none"])
    for last, level in ((0.9, "INFO"), (0.1, "WARNING")):
        with caplog.at_level("INFO", "dschat"):
            log = MetricsLog(str(tmp_path), config)
            log.write(0, {"eval/pass@1": 0.5})
            log.write_verdict(100, WHERE)
            log.write(4, {"eval/pass@1": last})
            log.write_verdict(100, WHERE)
            log.close()
        (row,) = whole_rows(tmp_path / WARNINGS)
        assert row["verdict"].startswith("Held-out answers got ")
        assert (row["step"], row.get("warning")) == (4, row["verdict"] if last < 0.5 else None)
        assert caplog.records[-1].levelname == level
    assert (tmp_path / METRICS).exists()


def test_a_task_that_was_solved_from_the_start_is_no_warning():
    assert not verdict(run_of("eval/pass@1", (0.98, 0.99, 0.98)), 300, WHERE)[1]
    assert verdict(run_of("eval/pass@1", (0.90, 0.91, 0.90)), 300, WHERE)[1]
    assert verdict(run_of("eval/score", (0.98, 0.99, 0.98)), 300, WHERE)[1]
