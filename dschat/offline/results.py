"""Summarizes metrics as a table on standard output and as a JSON file."""

import json
import os
import sys
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from dschat.config import UserError
from dschat.config.errors import require
from dschat.offline.flags import EvalConfig
from dschat.offline.statistics import Values, paired_difference
from dschat.startup.files import replace_file

_WIDTH = 160  # characters of the table where standard output is not a terminal
FLAG = "--out"


@dataclass
class Results:
    """Every metric with its confidence interval, and its differences from the first model.

    ``metrics`` and ``differences`` hold JSON values, in the order of the models.
    """

    settings: dict[str, Any]
    num_rows: int
    metrics: list[dict[str, Any]]
    differences: list[dict[str, Any]]

    @classmethod
    def of(
        cls, config: EvalConfig, num_rows: int, by_label: dict[str, dict[str, Values]]
    ) -> "Results":
        """``by_label``: label of a model or file -> name of a metric -> its values per row."""
        options = config.confidence, config.num_resamples, config.seed
        metrics, differences = [], []
        baseline, *_ = by_label
        names = dict.fromkeys(name for values in by_label.values() for name in values)
        for name in names:
            for label, values in by_label.items():
                if name not in values:
                    continue
                row = {"metric": name, "model": label}
                method = "wilson" if values[name].kind == "share" else "bootstrap"
                interval = asdict(values[name].interval(*options))
                metrics.append(row | interval | {"interval": method})
                if label != baseline and name in by_label[baseline]:
                    difference = paired_difference(values[name], by_label[baseline][name], *options)
                    differences.append(row | {"baseline": baseline} | asdict(difference))
        return cls(asdict(config), num_rows, metrics, differences)

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
        for name in ("value", level, "difference", level, "p"):
            table.add_column(name, justify="right", no_wrap=True)
        for row in self.metrics:
            cells = [row["metric"], row["model"], _number(row["value"]), _bounds(row)]
            other = differences.get((row["metric"], row["model"]))
            if other is not None:
                cells += [_number(other["value"], "+"), _bounds(other, "+"), f"{other['p']:.2g}"]
            table.add_row(*cells)
        width = None if sys.stdout.isatty() else _WIDTH
        text = StringIO()
        console = Console(file=text, width=width, highlight=False, markup=False)
        first = self.metrics[0]["model"] if self.metrics else ""
        note = f"; differences from {first}, paired" if self.differences else ""
        console.print(f"{self.num_rows:,} rows{note}")
        console.print(table)
        return text.getvalue()

    def write(self, path: str) -> None:
        """Write all of it as JSON to ``path``, which is complete or unchanged."""
        out = Path(os.path.expanduser(path))
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            replace_file(out, json.dumps(asdict(self), indent=1) + "\n")
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
        isinstance(content, dict) and {"num_rows", "metrics", "differences"} <= set(content),
        f"{FLAG} {path} exists, and dschat eval did not write it; name another file",
    )


def labels_of(names: list[str]) -> list[str]:
    """The shortest ends of the paths that tell them apart."""
    parts = [os.path.normpath(name).split(os.sep) for name in names]
    longest = max(map(len, parts))
    for length in range(1, longest + 1):
        labels = ["/".join(part[-length:]) for part in parts]
        if len(set(labels)) == len(labels):
            break
    return labels


def _number(value: float, sign: str = "") -> str:
    return format(value, f"{sign}.4g" if abs(value) >= 100 else f"{sign}.3f")


def _bounds(row: dict[str, Any], sign: str = "") -> str:
    return f"{_number(row['low'], sign)} to {_number(row['high'], sign)}"
