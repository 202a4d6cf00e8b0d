"""Intervals and paired differences, against published values and SciPy; strict JSON."""

import json

import numpy as np
import pytest

from dschat.config import UserError, parser
from dschat.offline.evaluate import Results, check_out, interval
from dschat.offline.flags import EvalConfig

Z95 = 1.959964


@pytest.mark.parametrize(
    ("right", "total", "low", "high"),
    [  # Newcombe 1998, Statistics in Medicine 17, 857-872, table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_a_share_has_wilsons_interval(right, total, low, high):
    found = interval(np.array([1.0] * right + [0.0] * (total - right)), 0.95)
    assert (found["value"], found["rows"]) == (right / total, total)
    assert (found["low"], found["high"]) == pytest.approx((low, high), abs=5e-5)


def test_wilson_of_all_right_ends_at_one():
    assert interval(np.ones(7), 0.9)["high"] == 1.0


def test_a_mean_has_its_standard_error():
    values = np.random.default_rng(0).normal(0.2, 1.0, size=40)
    found = interval(values, 0.95)
    error = values.std() / np.sqrt(39)
    assert found["value"] == pytest.approx(values.mean())
    assert found["high"] - found["value"] == pytest.approx(Z95 * error)
    assert found["value"] - found["low"] == pytest.approx(Z95 * error)


def test_p_is_that_of_the_normal_distribution():
    values = np.array([-1.0, 1.0, 2.0, 2.5])
    error = values.std(ddof=1) / 2
    shifted = values - values.mean() - Z95 * error
    assert interval(shifted, 0.9, is_difference=True)["p"] == pytest.approx(0.05, abs=1e-6)


def results(first: list[float], second: list[float]) -> Results:
    config = parser.parse(EvalConfig, ["--answers", "a", "b", "--task", "score"])
    return Results.of(config, {"a": {"m": np.array(first)}, "b": {"m": np.array(second)}})


def test_a_difference_is_of_paired_rows():
    one, other = [0.1, 0.8, 0.3, 0.95, 0.4], [0.0, 0.9, 0.1, 0.7, 0.35]
    (difference,) = results(other, one).differences
    steps = np.array(one) - np.array(other)
    assert difference["value"] == pytest.approx(0.1)
    width = 2 * Z95 * steps.std(ddof=1) / np.sqrt(5)
    assert difference["high"] - difference["low"] == pytest.approx(width)
    assert (difference["model"], difference["baseline"]) == ("b", "a")


def test_equal_models_do_not_differ():
    (difference,) = results([0.5, 1.0, 1.0], [0.5, 1.0, 1.0]).differences
    assert [difference[k] for k in ("value", "low", "high", "p")] == [0, 0, 0, 1]


def test_few_scored_rows_have_finite_intervals():
    """Three rows of twenty have a score; and of them two in both files."""
    nan = [float("nan")] * 17
    found = results([0.2, 0.5, 0.9, *nan], [0.3, 0.1, float("nan"), *nan])
    assert [row["rows"] for row in (*found.metrics, *found.differences)] == [3, 2, 2]
    numbers = [row[k] for row in found.metrics for k in ("value", "low", "high")]
    assert np.isfinite(numbers).all()


@pytest.mark.parametrize("values", [[0.5], [float("nan")] * 3, [float("inf"), 1.0], [1.0]])
def test_the_file_is_strict_json(values, tmp_path):
    """One row, none with a score, an infinite one: numbers that are not known are null."""
    found = results(values, values)
    found.write(str(tmp_path / "out.json"))
    read = json.loads((tmp_path / "out.json").read_text(), parse_constant=pytest.fail)
    assert read["metrics"] == found.metrics
    assert "nan" not in found.text()


def test_a_name_that_no_file_can_have_is_refused_first(tmp_path):
    with pytest.raises(UserError, match="--out .*xx: File name too long; name another file"):
        check_out(str(tmp_path / ("x" * 300)))
