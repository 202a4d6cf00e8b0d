"""Normalizes raw rows to ``Example`` rows, one by one or as a table cached on disk.

Every line of a ``RawRows`` gives one row of ``SCHEMA``, usable or not. Unusable rows are logged, or
raise ``UserError`` (``--on_bad_row``).
"""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from datasets import Dataset, Features, Value

from dschat.config import UserError
from dschat.data.sources.adapters import CONTENT_FIELDS, Example, Purpose, look_up, normalize
from dschat.data.sources.known_datasets import ColumnAdapter
from dschat.data.sources.resolve import RawRows, broken_line
from dschat.data.sources.table_cache import cached_table
from dschat.data.sources.turns import unread_keys

logger = logging.getLogger("dschat")

# `problem`: why the step cannot use the row; `fault`: why it could not be read; `where`: its place
# in the source, for rows with a problem or a fault; `unread`: keys of turns that nothing reads.
NOTES = ("key", "problem", "unread", "fault", "where")
SCHEMA = Features({f: Value("string") for f in (*CONTENT_FIELDS, *NOTES)})
NUM_LISTED = 10  # bad rows that the log lists individually
BROKEN = "an unreadable line"


def normalized_rows(
    rows: RawRows, adapter: ColumnAdapter, purpose: Purpose
) -> Iterator[dict[str, Any]]:
    """A row of ``SCHEMA`` for every line, in order.

    The row of an unreadable line has no content and no key.
    """
    unreadable = {**Example("").to_row(), "key": "", "problem": BROKEN}
    for line in rows:
        raw = line.row or {}
        row = normalize(raw, adapter, purpose, line.form) if line.row is not None else unreadable
        notes = {"fault": line.fault, "where": line.where if row["problem"] else ""}
        notes["unread"] = ", ".join(unread_keys(look_up(raw, c) for c in adapter.roles.values()))
        yield {**row, **notes}


def normalized_table(rows: RawRows, adapter: ColumnAdapter, purpose: Purpose) -> Dataset:
    """``normalized_rows`` as a table: cached on disk, or in memory if the source is."""
    if rows.in_memory:
        return Dataset.from_list(list(normalized_rows(rows, adapter, purpose)), features=SCHEMA)
    # repr of a function has its address, which differs between processes
    stable = {**vars(adapter), "rewrite": adapter.rewrite and adapter.rewrite.__name__}
    content = repr([rows.stamp, rows.name, stable, purpose])
    return cached_table(content, SCHEMA, lambda: normalized_rows(rows, adapter, purpose))


def report_bad_rows(name: str, rows: Dataset, on_bad_row: str, flag: str, hint: str = "") -> None:
    """Warn of the bad rows in a table of ``SCHEMA`` and list the first ones; count unread keys.

    Raises:
        UserError: a bad row that ``on_bad_row`` does not allow, or no usable rows; names the place
            and the remedy.
    """
    bad: Counter[str] = Counter()
    listed: list[str] = []
    unread: Counter[str] = Counter()
    for row in iterate(rows, ("problem", "unread", "fault", "where")):
        unread.update(filter(None, row["unread"].split(", ")))
        if not row["problem"]:
            continue
        check_allowed(row, on_bad_row, flag)
        bad[row["problem"]] += 1
        if len(listed) < NUM_LISTED:
            why = row["fault"].removesuffix("; fix it") or row["problem"]
            listed.append(f"{row['where']}: {why}")
    if keys := ", ".join(f"{key} ({count:,} rows)" for key, count in unread.items()):
        logger.info("%s: keys of turns that change neither text nor loss: %s", name, keys)
    if not bad:
        return
    why = ", ".join(f"{count} with {problem}" for problem, count in bad.items())
    if bad.total() == len(rows):
        first = listed[0].partition(": ")[0]
        raise UserError(f"{flag}: {name} has no usable rows: {why}{hint}; see {first}")
    logger.warning(
        "%s: dropped %d of %d rows (%s); %s: %s",
        *(name, bad.total(), len(rows), why),
        *("the first ten" if bad.total() > len(listed) else "namely", "; ".join(listed)),
    )


def check_allowed(row: Mapping[str, str], on_bad_row: str, flag: str) -> None:
    """Raise ``UserError`` for a bad row of ``SCHEMA`` that ``--on_bad_row`` does not allow."""
    if on_bad_row == "error" or (on_bad_row == "auto" and row["fault"]):
        raise broken_line(flag, row["where"], row["fault"] or row["problem"])


def iterate(rows: Dataset, columns: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """The rows' values in ``columns``, decoded one batch at a time to bound memory."""
    table = rows.select_columns(list(columns)).with_format("arrow")
    for batch in table.iter(1000) if len(rows) else ():
        yield from batch.to_pylist()


def non_empty(rows: Dataset, column: str) -> np.ndarray:
    """(number of rows,) bool: True where a text column is not empty."""
    flags = (bool(row[column]) for row in iterate(rows, (column,)))
    return np.fromiter(flags, dtype=bool, count=len(rows))
