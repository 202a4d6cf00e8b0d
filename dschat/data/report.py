"""Counts the rows of a tokenized table that are kept, cut and dropped, and their lengths.

The columns ``problem`` and ``cut`` of the table say what happened to each row.
"""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pyarrow.compute
from datasets import Dataset


@dataclass
class DataReport:
    """Rows kept, rows dropped and cut (by reason), lengths in tokens."""

    name: str
    rows: int
    dropped: Counter[str] = field(default_factory=Counter)
    cut: Counter[str] = field(default_factory=Counter)
    mean_len: float = 0.0
    max_len: int = 0
    p50_len: int = 0
    p95_len: int = 0

    def __str__(self) -> str:
        parts = [
            f"{self.name}: {self.rows} rows of {self.mean_len:.0f} tokens (longest {self.max_len})"
        ]
        parts += [f"{count} dropped ({why})" for why, count in self.dropped.items()]
        parts += [f"{count} {part}" for part, count in self.cut.items()]
        return "; ".join(parts)


def read_report(name: str, table: Dataset, ids_column: str) -> tuple[DataReport, np.ndarray]:
    """The report of a table, and the indices of the rows that are kept.

    Column ``problem`` says why a row is dropped, ``cut`` what it lost (joined by "; "); both are
    optional. Columns are read one batch at a time.
    """
    notes = [column for column in ("problem", "cut") if column in table.column_names]
    dropped: Counter[str] = Counter()
    cut: Counter[str] = Counter()
    lengths, kept = [], []
    batches = table.select_columns([ids_column, *notes]).with_format("arrow").iter(1000)
    for batch in batches if len(table) else ():
        problems, cuts = (
            batch[column].to_pylist() if column in notes else [""] * len(batch)
            for column in ("problem", "cut")
        )
        keep = np.array([not problem for problem in problems])
        dropped.update(problem for problem in problems if problem)
        cut.update(
            part
            for note, is_kept in zip(cuts, keep, strict=True)
            if note and is_kept
            for part in note.split("; ")
        )
        lengths.append(pyarrow.compute.list_value_length(batch[ids_column]).to_numpy()[keep])
        kept.append(keep)
    kept_rows = np.concatenate(kept or [np.zeros(0, dtype=bool)])
    return _report(name, lengths, dropped, cut), np.flatnonzero(kept_rows)


def _report(
    name: str, lengths: list[np.ndarray], dropped: Counter[str], cut: Counter[str]
) -> DataReport:
    all_lengths = np.concatenate(lengths or [np.zeros(0, dtype=int)])
    report = DataReport(name, len(all_lengths), dropped, cut)
    if len(all_lengths):
        report.mean_len = float(all_lengths.mean())
        report.max_len = int(all_lengths.max())
        report.p50_len, report.p95_len = (
            int(n) for n in np.percentile(all_lengths, [50, 95], method="inverted_cdf")
        )
    return report
