"""Numbers of figures by hand; every figure has axes, and plotly knows what it is given."""

import numpy as np
import pytest
from run_folders import write_rows, write_run

from dschat.observability.metrics_log import whole_rows
from dschat.reporting.figures import running_mean, sections_of, spread
from dschat.reporting.run_files import read_runs


def figures_of(*folders, max_points=1000):
    sections = sections_of(read_runs([str(folder) for folder in folders]), max_points)
    return {figure.name: figure for section in sections for figure in section.figures}


BLUE, ORANGE = "#3b82d6", "#d9622b"


def styles(figure) -> list[tuple[str, str, str]]:
    """Name, color and dash of its curves."""
    return [(t["name"], t["line"]["color"], t["line"]["dash"]) for t in figure.traces]


def points(trace) -> tuple[str, list, list]:
    return trace["name"], trace["x"], trace["y"]


def test_one_run_has_a_color_per_metric(tmp_path):
    loss = figures_of(write_run(tmp_path))["step1_sft-loss"]
    assert styles(loss) == [("training", BLUE, "solid"), ("held out", ORANGE, "solid")]
    assert [points(trace) for trace in loss.traces] == [
        ("training", [1, 2, 3, 4], [4.0, 2.0, 4.0 / 3, 1.0]),
        ("held out", [0, 4], [5.0, 1.0]),
    ]
    assert [trace["mode"] for trace in loss.traces] == ["lines+markers", "markers"]


def test_several_runs_have_a_color_per_run_and_a_dash_per_metric(tmp_path):
    figures = figures_of(write_run(tmp_path / "a"), write_run(tmp_path / "b"))
    assert styles(figures["step1_sft-loss"]) == [
        ("a, training", BLUE, "solid"),
        ("a, held out", BLUE, "dash"),
        ("b, training", ORANGE, "solid"),
        ("b, held out", ORANGE, "dash"),
    ]
    assert [trace["name"] for trace in figures["step3_rlhf-kl-to-the-reference-model"].traces] == [
        "a",
        "b",
    ]


def test_seconds_of_an_iteration_by_phase(tmp_path):
    figures = figures_of(write_run(tmp_path / "a"))
    breakdown = figures["step3_rlhf-breakdown"]
    assert breakdown.layout["barmode"] == "stack"
    assert [points(bars) for bars in breakdown.traces] == [
        ("generate", [1, 2, 3], [1.0, 2.0, 3.0]),
        ("score", [1, 2, 3], [2.0] * 3),
        ("train", [1, 2, 3], [3.0] * 3),
    ]
    several = figures_of(tmp_path / "a", write_run(tmp_path / "b", iterations=1))
    generate = several["step3_rlhf-breakdown"].traces[0]
    # a: the mean of iterations 2 and 3; b has only the first
    assert points(generate) == ("generate", ["a", "b"], [2.5, 1.0])


def test_score_by_kl(tmp_path):
    """Of the steps that have both; a color per metric, or per run."""
    out = write_run(tmp_path / "a")
    evaluated = [{"step": n, "eval/score": n, "eval/kl": n / 4} for n in (0, 2)]
    rows = [*whole_rows(out / "step3_rlhf/metrics.jsonl"), *evaluated, {"step": 9, "eval/kl": 1.0}]
    write_rows(out / "step3_rlhf/metrics.jsonl", rows)
    figure = figures_of(out)["step3_rlhf-score-against-kl"]
    training, held_out = figure.traces
    assert points(training)[:2] == ("rollouts", [0.01, 0.02, 0.03])
    assert training["y"] == pytest.approx([0.1, 0.2, 0.3])
    assert points(held_out) == ("held out", [0.0, 0.5], [0, 2])
    assert (training["meta"], held_out["meta"]) == ([1, 2, 3], [0, 2])  # iterations, for colors
    (thinned, _) = figures_of(out, max_points=2)["step3_rlhf-score-against-kl"].traces
    assert (thinned["x"], thinned["meta"]) == ([0.01, 0.03], [1, 3])
    assert styles(figure) == [("rollouts", BLUE, "solid"), ("held out", ORANGE, "solid")]
    several = figures_of(out, write_run(tmp_path / "b"))["step3_rlhf-score-against-kl"]
    assert styles(several) == [
        ("a, rollouts", BLUE, "solid"),
        ("a, held out", BLUE, "dash"),
        ("b, rollouts", ORANGE, "solid"),
    ]
    assert not any("meta" in trace for trace in several.traces)


def test_step_3_is_first(tmp_path):
    write_rows(write_run(tmp_path) / "step2_reward/metrics.jsonl", [{"step": 1, "loss": 0.7}])
    sections = sections_of(read_runs([str(tmp_path)]), 1000)
    numbers = [section.title[:6] for section in sections]
    assert list(dict.fromkeys(numbers)) == ["Step 3", "Step 1", "Step 2"]


def test_an_average_starts_as_the_policy(tmp_path):
    rows = [{"step": n, "eval/gold": n / 10} for n in (0, 5)] + [{"step": 5, "eval_ema/gold": 0.25}]
    write_rows(tmp_path / "step3_rlhf/metrics.jsonl", rows)
    policy, average = figures_of(tmp_path)["step3_rlhf-gold-score"].traces
    assert (policy["y"], average["x"], average["y"]) == ([0.0, 0.5], [0, 5], [0.0, 0.25])


def test_entropy_begins_at_0_and_titles_stand_off(tmp_path):
    rows = [{"step": n, "objective/entropy": 2.0, "objective/scores": 9.0} for n in (1, 2)]
    write_rows(tmp_path / "step3_rlhf/metrics.jsonl", rows)
    figures = figures_of(tmp_path)
    entropy, score = (figures[f"step3_rlhf-{name}"].layout for name in ("entropy", "score"))
    assert (entropy["yaxis"]["rangemode"], score["yaxis"]["rangemode"]) == ("tozero", "normal")
    assert entropy["yaxis"]["title"]["standoff"] > 0


def test_a_metric_without_a_chart_is_among_the_others(tmp_path):
    sections = sections_of(read_runs([str(write_run(tmp_path))]), 1000)
    (others,) = [section for section in sections if section.is_folded and "3" in section.title]
    labels = [(f.title, f.layout["yaxis"]["title"]["text"]) for f in others.figures]
    assert {("custom/metric_s", "seconds"), ("memory/peak_gib", "GiB")} <= {*labels}


def test_long_curves_are_smoothed_and_thinned(tmp_path):
    rows = [{"step": n, "loss": float(n % 2)} for n in range(1, 1001)]
    write_rows(tmp_path / "step1_sft/metrics.jsonl", rows)
    faint, curve = figures_of(tmp_path, max_points=100)["step1_sft-loss"].traces
    assert (faint["showlegend"], curve["showlegend"]) == (False, True)
    assert faint["opacity"] < curve["opacity"]
    assert set(faint["y"]) == {0.0, 1.0}
    assert all(0.4 < y < 0.6 for y in curve["y"])
    for xs in (faint["x"], curve["x"]):
        assert (len(xs), xs[0], xs[-1]) == (100, 1, 1000)


def test_running_mean_at_the_ends():
    assert running_mean(np.array([1.0, 2, 6, 0]), 3).tolist() == [1.5, 3.0, 8 / 3, 3.0]


def test_spread_has_both_ends():
    assert spread(10, 4) == [0, 3, 6, 9]
    assert spread(2, 4) == [0, 1]


def test_preferences_are_step_2(tmp_path):
    rows = [{"step": n, "loss": 0.7, "rewards/accuracies": 0.5} for n in range(3)]
    write_rows(tmp_path / "step3_rlhf/metrics.jsonl", rows)
    sections = sections_of(read_runs([str(tmp_path)]), 1000)
    assert sections[0].title == "Step 2: Preferences"
    layouts = [figure.layout for section in sections for figure in section.figures]
    assert {layout["xaxis"]["title"]["text"] for layout in layouts} == {"optimizer step"}


def test_every_figure_is_drawn_with_named_axes(tmp_path):
    graph_objects = pytest.importorskip("plotly.graph_objects")
    figures = figures_of(write_run(tmp_path / "a$b"), write_run(tmp_path / "<b>"))
    for figure in figures.values():
        drawn = {"data": figure.traces, "layout": figure.layout}
        layout = graph_objects.Figure(drawn).layout  # plotly checks every name and value
        assert layout.xaxis.title.text
        assert layout.yaxis.title.text
    y_axis = figures["step3_rlhf-breakdown"].layout["yaxis"]
    assert y_axis["title"]["text"] == "seconds per iteration"
