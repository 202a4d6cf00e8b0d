"""Counts the rows of a tokenized table that are kept, cut and dropped, and their lengths.

The columns ``problem`` and ``cut`` of the table say what happened to each row.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pyarrow
import pyarrow.compute as pc
from datasets import Dataset


@dataclass
class DataReport:
    """Rows kept, rows dropped and cut (by reason), lengths in tokens."""

    name: str
    rows: int
    dropped: Counter[str]
    cut: Counter[str]
    mean_len: float
    max_len: int
    p50_len: int
    p95_len: int

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
    optional. The texts of the columns stay on disk.
    """
    rows = table.with_format("arrow")[:]
    is_kept = np.ones(len(rows), dtype=bool)
    dropped: Counter[str] = Counter()
    cut: Counter[str] = Counter()
    if "problem" in rows.column_names:
        is_kept = pc.equal(rows["problem"], "").to_numpy()
        dropped.update(dict(_counts(rows["problem"])))
        for parts, count in _counts(rows["cut"].filter(is_kept)):
            cut.update(dict.fromkeys(parts.split("; "), count))
    kept = np.flatnonzero(is_kept)
    lengths = pc.list_value_length(rows[ids_column]).to_numpy()[kept] if len(kept) else np.zeros(1)
    p50, p95 = np.percentile(lengths, [50, 95], method="inverted_cdf")
    figures = float(lengths.mean()), int(lengths.max()), int(p50), int(p95)
    return DataReport(name, len(kept), dropped, cut, *figures), kept


def _counts(texts: pyarrow.ChunkedArray) -> list[tuple[str, int]]:
    """Each text that is not empty, in the order of its first appearance, with its number."""
    found = pc.value_counts(texts).to_pylist()
    return [(each["values"], each["counts"]) for each in found if each["values"]]
