"""Describes a figure to plotly.js: its traces and layout, as JSON values.

The page sets the colors of text, grid and background, which depend on its theme.
"""

import html
from typing import Any

from dschat.reporting.figures import Curve, Figure

_COLORS = (  # contrast of at least 3 on white and on the page's dark background
    "#3b82d6",
    "#d9622b",
    "#1f9d6b",
    "#9366d8",
    "#b8860b",
    "#d1508f",
    "#1496a8",
    "#7a7f87",
)
_DASHES = (("solid", "circle"), ("dash", "square"), ("dot", "diamond"), ("dashdot", "x"))
_FEW_POINTS = 40  # drawn with markers


def spec_of(figure: Figure) -> dict[str, Any]:
    """``data`` and ``layout`` of ``Plotly.newPlot``."""
    traces = [_trace(curve) for curve in figure.curves]
    traces += [
        {
            "type": "bar",
            "name": html.escape(bars.label),  # plotly renders tags
            "x": [html.escape(x) if isinstance(x, str) else x for x in bars.xs],
            "y": bars.ys,
            "marker": {"color": _color(bars.color)},
        }
        for bars in figure.bars
    ]
    num_labels = sum(not curve.faint for curve in figure.curves) + len(figure.bars)
    axis = {"automargin": True, "showline": True, "showgrid": True, "zeroline": False}
    layout = {
        "xaxis": {"title": {"text": figure.x_label}, **axis},
        "yaxis": {
            "title": {"text": figure.y_label},
            **axis,
            "exponentformat": "power",
            "minexponent": 5,
            "type": "log" if figure.is_log else "linear",
        },
        "barmode": "stack" if figure.is_stacked else "group",
        "bargap": 0.15,
        "showlegend": num_labels > 1,
        "legend": {"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0},
        "margin": {"l": 56, "r": 12, "t": 8, "b": 44},
        "hovermode": "x unified" if figure.curves else "closest",
    }
    return {"data": traces, "layout": layout}


def _trace(curve: Curve) -> dict[str, Any]:
    # A line between the evaluations before and after training would invent what is between.
    has_line = len(curve.xs) > 2
    dash, symbol = _DASHES[curve.dash % len(_DASHES)]
    mode = "+".join(["lines"] * has_line + ["markers"] * (len(curve.xs) <= _FEW_POINTS))
    return {
        "type": "scatter",
        "mode": mode,
        "name": html.escape(curve.label),
        "x": curve.xs,
        "y": curve.ys,
        "line": {"color": _color(curve.color), "dash": dash, "width": 2},
        "marker": {"size": 5 if has_line else 9, "symbol": symbol},
        "opacity": 0.28 if curve.faint else 1.0,
        "showlegend": not curve.faint,
        "hoverinfo": "skip" if curve.faint else "all",
    }


def _color(index: int) -> str:
    return _COLORS[index % len(_COLORS)]
