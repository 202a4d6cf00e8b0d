"""Draws figures with matplotlib, as PNG and SVG files."""

from collections.abc import Iterable
from pathlib import Path

from dschat.reporting.figures import Figure
from dschat.reporting.palette import color, line_style, symbol

_HEIGHT = 3.6  # inches of the axes and the title
_LONG_LABEL = 16  # characters
_LONG_AXIS = 70  # characters of all labels


def write_figures(figures: Iterable[Figure], folder: Path) -> int:
    """Write FOLDER/NAME.png and .svg for each figure; returns their number.

    Files of an earlier report that has other figures are removed.
    """
    from matplotlib.figure import Figure as Canvas

    folder.mkdir(parents=True, exist_ok=True)
    written = set()
    for figure in figures:
        canvas = Canvas(figsize=(7, _HEIGHT), dpi=150)
        axes = canvas.subplots()
        _draw(figure, axes)
        handles, labels = axes.get_legend_handles_labels()
        columns = 2 if max(map(len, labels), default=0) > _LONG_LABEL else 4
        num_rows = -(-len(labels) // columns) if len(labels) > 1 else 0
        if num_rows:
            canvas.legend(
                handles, labels, loc="lower center", ncols=columns, frameon=False, fontsize=8
            )
        # A constrained layout would take twice the time of all the rest.
        below = 0.6 + 0.2 * num_rows + 0.15 * _has_long_names(figure)  # inches
        canvas.set_figheight(_HEIGHT + below)
        bottom, top = (inches / (_HEIGHT + below) for inches in (below, _HEIGHT + below - 0.3))
        canvas.subplots_adjust(left=0.14, right=0.98, top=top, bottom=bottom)
        for suffix in ("png", "svg"):
            path = folder / f"{figure.name}.{suffix}"
            # Without the date, the same numbers give the same file.
            canvas.savefig(path, metadata={"Date": None} if suffix == "svg" else None)
            written.add(path)
    for path in [*folder.glob("step[123]_*.png"), *folder.glob("step[123]_*.svg")]:
        if path not in written:
            path.unlink()
    return len(written) // 2


def _draw(figure: Figure, axes) -> None:  # type: ignore[no-untyped-def]  # matplotlib is optional
    for curve in figure.curves:
        axes.plot(
            curve.xs,
            curve.ys,
            color=color(curve.color),
            linestyle=line_style(curve.dash) if curve.has_line else "",
            linewidth=1.6,
            alpha=0.28 if curve.faint else 1.0,
            marker=symbol(curve.dash)[1] if curve.has_markers else "",
            markersize=3 if curve.has_line else 6,
            label="_nolegend_" if curve.faint else _plain(curve.label),
        )
    if figure.bars:
        _draw_bars(figure, axes)
    axes.set_title(_plain(figure.title), loc="left", fontsize=11)
    axes.set_xlabel(_plain(figure.x_label))
    axes.set_ylabel(_plain(figure.y_label))
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if figure.is_log:
        axes.set_yscale("log")


def _draw_bars(figure: Figure, axes) -> None:  # type: ignore[no-untyped-def]
    names = figure.bars[0].xs
    is_named = any(isinstance(x, str) for x in names)
    places = [float(i) for i in range(len(names))] if is_named else [float(x) for x in names]
    gaps = [right - left for left, right in zip(places, places[1:], strict=False)]
    width = 0.85 * min(gaps, default=1.0)
    bottoms = [0.0] * len(places)
    for number, bars in enumerate(figure.bars):
        if figure.is_stacked:
            lefts, each = places, width
        else:
            each = width / len(figure.bars)
            lefts = [x + (number + 0.5) * each - width / 2 for x in places]
        axes.bar(lefts, bars.ys, each, bottoms, color=color(bars.color), label=_plain(bars.label))
        if figure.is_stacked:
            bottoms = [below + y for below, y in zip(bottoms, bars.ys, strict=True)]
    if is_named:
        labels = [_plain(str(x)) for x in names]
        axes.set_xticks(places, labels, rotation=15 if _has_long_names(figure) else 0)


def _has_long_names(figure: Figure) -> bool:
    names = [x for bars in figure.bars[:1] for x in bars.xs if isinstance(x, str)]
    return sum(map(len, names)) > _LONG_AXIS


def _plain(text: str) -> str:
    """``text`` without mathematics, which matplotlib reads between dollar signs."""
    return text.replace("$", r"\$")
