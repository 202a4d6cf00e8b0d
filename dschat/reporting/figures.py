"""Turns the metrics of runs into figures, as plotly.js draws them: curves and bars.

The page sets the colors of text, grid and background, which depend on its theme.
"""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dschat.reporting.charts import PHASES, Chart, charts_of, file_name
from dschat.reporting.run_files import STEPS, Run, Series, Step, is_finite

Trace = dict[str, Any]  # a curve, or the bars of one color

_SMOOTH_FROM = 80  # points
_WINDOWS = 40  # running-mean windows in a curve
_MAX_BARS = 60
_MAX_POINTS = 1000  # of a curve; longer ones are thinned
_FEW_POINTS = 40  # drawn with markers
_FROM_ZERO = ("nats per token", "share of answers")  # y axes that begin there
_COLORS = (  # contrast of at least 3 on white and on the page's dark background
    *("#3b82d6", "#d9622b", "#1f9d6b", "#9366d8", "#b8860b", "#d1508f", "#1496a8", "#7a7f87"),
)
_DASHES = (("solid", "circle"), ("dash", "square"), ("dot", "diamond"), ("dashdot", "x"))
_HEADINGS = {"other": ", other metrics"}


@dataclass(frozen=True)
class Figure:
    """``traces`` and ``layout``: ``data`` and ``layout`` of ``Plotly.newPlot``, JSON values."""

    name: str
    title: str
    caption: str
    traces: list[Trace]
    layout: dict[str, Any]


@dataclass(frozen=True)
class Section:
    """Figures under one heading; ``is_folded``: shown on demand."""

    name: str
    title: str
    figures: list[Figure]
    is_folded: bool = False


def sections_of(runs: Sequence[Run], max_points: int = _MAX_POINTS) -> list[Section]:
    """The figures of all steps that ``runs`` have, step 3 before those that prepare it; those
    without data are left out.
    """
    sections = []
    for number, (name, title) in sorted(enumerate(STEPS.items(), 1), key=lambda step: step[0] < 3):
        having = [run for run in runs if name in run.steps]
        steps = [run.steps[name] for run in having]
        if any("rewards/accuracies" in step.metrics for step in steps):
            number, title = 2, "Preferences"
        heading = f"Step {number}: {title}"
        for kind, charts in charts_of(name, steps).items() if steps else ():
            figures = [_lines(chart, name, having, runs, max_points) for chart in charts]
            if not kind:
                figures += _breakdowns(name, having)
            folder = "-".join(filter(None, (name, kind)))
            if figures := [figure for figure in figures if figure.traces]:
                full = heading + _HEADINGS.get(kind, "")
                sections.append(Section(folder, full, figures, kind == "other"))
    return sections


def _lines(
    chart: Chart, step: str, having: Sequence[Run], runs: Sequence[Run], max_points: int
) -> Figure:
    """One curve per run and metric: runs differ by color and metrics by dash, or, in a figure of
    one run, metrics by color.
    """
    present = [m for m in chart.metrics if any(run.steps[step].series(m) for run in having)]
    curves = []
    for run in having:
        for index, metric in enumerate(present):
            series = run.steps[step].series(metric)
            if chart.over:
                at = dict(run.steps[step].series(chart.over[metric]))
                series = [point for point in series if point[0] in at]
                iterations = [number for number, _ in series]
                series = [(at[number], y) for number, y in series]
            if not series:
                continue
            if metric.startswith("eval_ema/"):  # an average starts as the policy
                start = run.steps[step].series(metric.replace("eval_ema/", "eval/"))[:1]
                series = [*(point for point in start if point[0] == 0), *series]
            label = chart.metrics[metric]
            if len(runs) > 1:
                label = run.name if len(present) == 1 else f"{run.name}, {label}"
                color, dash = runs.index(run), index
            else:
                color, dash = index, 0
            curves += _curves(series, label, color, dash, chart.is_smoothed, max_points)
            if chart.over and len(runs) == 1:  # the page colors the points by them
                curves[-1]["meta"] = [iterations[i] for i in spread(len(iterations), max_points)]
    is_supervised = any("loss" in run.steps[step].metrics for run in having)  # also DPO
    return _figure(
        f"{step}-{file_name(chart.title)}",
        chart.title,
        chart.x_label or ("optimizer step" if is_supervised else "iteration"),
        chart.y_label,
        sorted(curves, key=lambda curve: curve["showlegend"]),  # the faint ones first
        chart.caption,
        is_log=chart.is_log and all(y > 0 for curve in curves for y in curve["y"]),
    )


def _curves(
    series: Series, label: str, color: int, dash: int, is_smoothed: bool, max_points: int
) -> list[Trace]:
    """At most ``max_points`` of a curve's points; a long one is drawn faint below its mean."""
    xs, ys = (np.array(values, dtype=float) for values in zip(*series, strict=True))
    index, curves = spread(len(xs), max_points), []
    if is_smoothed and len(ys) >= _SMOOTH_FROM:
        curves.append(_curve(label, xs[index], ys[index], color, dash, is_faint=True))
        ys = running_mean(ys, max(3, len(ys) // _WINDOWS))
    return [*curves, _curve(label, xs[index], ys[index], color, dash)]


def running_mean(ys: np.ndarray, window: int) -> np.ndarray:
    """The mean over ``window`` points around each one, over fewer at both ends."""
    half = window // 2
    sums = np.concatenate([[0.0], np.cumsum(ys)])
    index = np.arange(len(ys))
    first, end = np.maximum(index - half, 0), np.minimum(index + half + 1, len(ys))
    return (sums[end] - sums[first]) / (end - first)


def _breakdowns(step: str, having: Sequence[Run]) -> list[Figure]:
    """Seconds of an iteration by phase, stacked: by iteration for one run, means for several.

    As DeepSpeed-Chat's paper breaks down the time per sequence (Yao et al. 2023, arXiv 2308.01320).
    """
    tables = ((run.name, phase_seconds(run.steps[step])) for run in having)
    seconds = {name: table for name, table in tables if len(table)}
    if not seconds:
        return []
    if len(seconds) == 1:
        (table,) = seconds.values()
        # Groups of iterations where there are more than bars.
        groups = np.array_split(table, min(len(table), _MAX_BARS))
        table = np.array([group.mean(axis=0) for group in groups])
        xs: Sequence[float | str] = table[:, 0].tolist()
        x_label, columns = "iteration", table[:, 1:]
        caption = "Mean of neighboring iterations where there are many."
    else:
        xs, x_label = list(seconds), "run"
        columns = np.array([_warm(table)[:, 1:].mean(axis=0) for table in seconds.values()])
        caption = "Mean of all iterations but the first."
    bars = [_bars(label, xs, columns[:, i], i) for i, label in enumerate(PHASES.values())]
    return [
        _figure(
            f"{step}-breakdown",
            "Where an iteration's seconds go",
            x_label,
            "seconds per iteration",
            bars,
            caption + " Refreshing the generator's weights is part of generate.",
            is_stacked=True,
        )
    ]


def _warm(table: np.ndarray) -> np.ndarray:
    """Without the first iteration, which compiles, allocates and fills caches."""
    later = table[table[:, 0] > 1]
    return later if len(later) else table


def phase_seconds(step: Step) -> np.ndarray:
    """Rows (iteration, seconds of each of `PHASES`), one per iteration that has them all."""
    rows = [
        [row["step"], *(row[name] for name in PHASES)]
        for row in step.rows
        if all(is_finite(row.get(name)) for name in PHASES)
    ]
    return np.array(rows, dtype=float).reshape(-1, 1 + len(PHASES))


def spread(count: int, most: int) -> list[int]:
    """At most ``most`` of ``count`` indices, evenly spread, the first and last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int)).tolist()


# -- plotly's values -------------------------------------------------------------------------------


def _figure(
    name: str,
    title: str,
    x_label: str,
    y_label: str,
    traces: list[Trace],
    caption: str,
    is_log: bool = False,
    is_stacked: bool = False,
) -> Figure:
    """``is_log``: of the y axis; ``is_stacked``: bars, which else stand side by side."""
    axis = {"automargin": True, "showline": True, "showgrid": True, "zeroline": False}
    is_curves = any(trace["type"] == "scatter" for trace in traces)
    has_names = any(isinstance(x, str) for trace in traces for x in trace["x"])
    layout = {
        "xaxis": {
            "title": {"text": x_label, "standoff": 12},
            **axis,
            "type": "category" if has_names else "-",
        },
        "yaxis": {
            "title": {"text": y_label, "standoff": 12},
            **axis,
            "rangemode": "tozero" if y_label in _FROM_ZERO else "normal",
            "exponentformat": "power",
            "minexponent": 5,
            "type": "log" if is_log else "linear",
        },
        "barmode": "stack" if is_stacked else "group",
        "bargap": 0.15,
        "showlegend": sum(trace.get("showlegend", True) for trace in traces) > 1,
        "legend": {"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0},
        "margin": {"l": 56, "r": 12, "t": 8, "b": 44},
        "modebar": {"bgcolor": "#0000", "color": _COLORS[-1], "activecolor": _COLORS[0]},
        "hovermode": "x unified" if is_curves else "closest",
    }
    return Figure(name, title, caption, traces, layout)


def _curve(
    label: str, xs: np.ndarray, ys: np.ndarray, color: int, dash: int, is_faint: bool = False
) -> Trace:
    """``color`` and ``dash`` are indices; a faint curve has no entry in the legend."""
    # A line between the evaluations before and after training would invent what is between.
    has_line = len(xs) > 2
    style, symbol = _DASHES[dash % len(_DASHES)]
    return {
        "type": "scatter",
        "mode": "+".join(["lines"] * has_line + ["markers"] * (len(xs) <= _FEW_POINTS)),
        "name": html.escape(label),  # plotly renders tags
        "x": xs.tolist(),
        "y": ys.tolist(),
        "line": {"color": _color(color), "dash": style, "width": 2},
        "marker": {"size": 5 if has_line else 9, "symbol": symbol},
        "opacity": 0.28 if is_faint else 1.0,
        "showlegend": not is_faint,
        "hoverinfo": "skip" if is_faint else "all",
    }


def _bars(label: str, xs: Sequence[float | str], ys: np.ndarray, color: int) -> Trace:
    """Heights over positions, or names, that all bars of a figure share."""
    return {
        "type": "bar",
        "name": html.escape(label),
        "x": [html.escape(x) if isinstance(x, str) else x for x in xs],
        "y": ys.tolist(),
        "marker": {"color": _color(color)},
    }


def _color(index: int) -> str:
    return _COLORS[index % len(_COLORS)]
