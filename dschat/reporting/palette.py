"""Colors and dashes of figures, the same in the page and in the files.

The colors have a contrast of at least 3 on white and on the page's dark background.
"""

COLORS = (
    "#3b82d6",
    "#d9622b",
    "#1f9d6b",
    "#9366d8",
    "#b8860b",
    "#d1508f",
    "#1496a8",
    "#7a7f87",
)
DASHES = ("solid", "dash", "dot", "dashdot")  # plotly's names
# Of each dash's points, where there are few: the same for plotly and matplotlib.
_SYMBOLS = (("circle", "o"), ("square", "s"), ("diamond", "D"), ("x", "x"))
_MATPLOTLIB = dict(zip(DASHES, ("-", "--", ":", "-."), strict=True))


def color(index: int) -> str:
    return COLORS[index % len(COLORS)]


def dash(index: int) -> str:
    return DASHES[index % len(DASHES)]


def line_style(index: int) -> str:
    """The dash in matplotlib's notation."""
    return _MATPLOTLIB[dash(index)]


def symbol(index: int) -> tuple[str, str]:
    """The marker of a dash's points, as plotly and as matplotlib call it."""
    return _SYMBOLS[index % len(_SYMBOLS)]
