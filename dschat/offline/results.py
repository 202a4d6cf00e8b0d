"""Confidence intervals of metrics and of differences between models; the table and the JSON file.

A mean has the standard error of its sample, as in lm-evaluation-harness, and a share Wilson's score
interval (Wilson 1927, JASA 22, 209-212). A difference is that of paired rows.
"""

import json
import math
import os
import sys
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from dschat.config import UserError
from dschat.config.errors import require
from dschat.offline.flags import EvalConfig
from dschat.startup.files import replace_file

_WIDTH = 160  # characters of the table where standard output is not a terminal
FLAG = "--out"

# By name: the values of rows (R,), NaN where a row has none; or one number that is not their mean.
Metrics = dict[str, np.ndarray | float]


@np.errstate(invalid="ignore")
def interval(values: np.ndarray, confidence: float, is_difference: bool = False) -> dict[str, Any]:
    """The mean of ``values`` (R,) that are not NaN, with the bounds of its confidence interval.

    Of a difference also ``p``: two-sided, of none. Numbers that are not known are None.
    """
    values = values[~np.isnan(values)]
    count, z = len(values), NormalDist().inv_cdf((1 + confidence) / 2)
    mean = float(values.mean()) if count else math.nan
    error = float(values.std(ddof=1)) / math.sqrt(count) if count > 1 else math.nan
    low, high = mean - z * error, mean + z * error
    numbers = {"value": mean, "low": low, "high": high}
    if is_difference:
        numbers["p"] = math.erfc(abs(mean) / error / math.sqrt(2)) if error else float(mean == 0)
    elif count and set(values) <= {0, 1}:
        numbers["low"], numbers["high"] = wilson(mean, count, z)
    return {k: v if math.isfinite(v) else None for k, v in numbers.items()} | {"rows": count}


def wilson(share: float, total: int, z: float) -> tuple[float, float]:
    """Bounds of a share of ``total``, ``z`` standard deviations around it."""
    middle = share + z * z / (2 * total)
    spread = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    # Without rounding: none right begins at 0, all right ends at 1.
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


@dataclass
class Results:
    """Every metric with its confidence interval, and its differences from the first model.

    ``metrics`` and ``differences`` hold JSON values, in the order of the models; None: not known.
    """

    settings: dict[str, Any]
    metrics: list[dict[str, Any]]
    differences: list[dict[str, Any]]

    @classmethod
    @np.errstate(invalid="ignore")
    def of(cls, config: EvalConfig, by_label: dict[str, Metrics]) -> "Results":
        """``by_label``: label of a model or file -> its metrics."""
        results, (baseline, *_) = cls(asdict(config), [], []), by_label
        for name in dict.fromkeys(name for metrics in by_label.values() for name in metrics):
            first = by_label[baseline].get(name)
            for label, metrics in by_label.items():
                if (found := metrics.get(name)) is None:
                    continue
                row = {"metric": name, "model": label}
                one = interval(np.atleast_1d(found), config.confidence)
                if not isinstance(found, np.ndarray):
                    one |= {"low": None, "high": None, "rows": None}
                results.metrics.append(row | one)
                if label != baseline and isinstance(first, np.ndarray):
                    difference = interval(found - first, config.confidence, is_difference=True)
                    results.differences.append(row | {"baseline": baseline} | difference)
        return results

    def text(self) -> str:
        """The metrics and differences as a table, fit for the terminal if there is one."""
        from rich import box
        from rich.console import Console
        from rich.table import Table

        level = f"{100 * self.settings['confidence']:g}% interval"
        differences = {(row["metric"], row["model"]): row for row in self.differences}
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name in ("metric", "model"):
            table.add_column(name, overflow="fold")
        for name in ("rows", "value", level, "difference", level, "p"):
            table.add_column(name, justify="right", no_wrap=True)
        for row in self.metrics:
            rows = "" if row["rows"] is None else f"{row['rows']:,}"
            cells = [row["metric"], row["model"], rows, _number(row["value"]), _bounds(row)]
            if other := differences.get((row["metric"], row["model"])):
                p = "" if other["p"] is None else f"{other['p']:.2g}"
                cells += [_number(other["value"], "+"), _bounds(other, "+"), p]
            table.add_row(*cells)
        width = None if sys.stdout.isatty() else _WIDTH
        text = StringIO()
        console = Console(file=text, width=width, highlight=False, markup=False)
        console.print(table)
        if self.differences:
            console.print(f"differences from {self.differences[0]['baseline']}, paired")
        return text.getvalue()

    def write(self, path: str) -> None:
        """Write all of it as JSON to ``path``, which is complete or unchanged."""
        out = Path(os.path.expanduser(path))
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            replace_file(out, json.dumps(asdict(self), indent=1, allow_nan=False) + "\n")
        except OSError as error:
            raise UserError(f"{FLAG} {path}: {error.strerror}; name another file") from None


def check_out(path: str | None) -> None:
    """Raise ``UserError`` where ``--out`` exists and is not the output of ``dschat eval``."""
    if path is None or not os.path.exists(os.path.expanduser(path)):
        return
    require(os.path.isfile(os.path.expanduser(path)), f"{FLAG} {path} is a folder; name a file")
    try:
        content = json.loads(Path(os.path.expanduser(path)).read_bytes())
    except ValueError:
        content = None
    require(
        isinstance(content, dict) and {"settings", "metrics", "differences"} <= set(content),
        f"{FLAG} {path} exists, and dschat eval did not write it; name another file",
    )


def _number(value: float | None, sign: str = "") -> str:
    if value is None:
        return ""
    return format(value, f"{sign}.4g" if abs(value) >= 100 else f"{sign}.3f")


def _bounds(row: dict[str, Any], sign: str = "") -> str:
    if row["low"] is None:
        return ""
    return f"{_number(row['low'], sign)} to {_number(row['high'], sign)}"
