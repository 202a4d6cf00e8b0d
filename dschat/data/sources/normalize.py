"""Normalises raw rows to ``Example`` rows, one by one or as a table cached on disk.

Every line of a ``RawRows`` gives one row of ``SCHEMA``, usable or not; in step 3 it also carries
the source's other columns. Unusable rows are logged, or raise ``UserError`` (``--on_bad_row``).
"""

import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any, Optional

import numpy as np
from datasets import Dataset, Features, Value

from dschat.config import UserError
from dschat.data.sources.adapters import CONTENT_FIELDS, Example, Purpose, normalise
from dschat.data.sources.columns import pack, packed_names
from dschat.data.sources.known_datasets import ColumnAdapter
from dschat.data.sources.resolve import RawRows, broken_line
from dschat.data.sources.table_cache import kept_on_disk

logger = logging.getLogger("dschat")

# `problem`: why the step cannot use the row; `fault`: why it could not even be read; `where`: the
# place in its source, of rows with a problem or a fault.
NOTES = ("key", "problem", "fault", "where")
SCHEMA = Features({f: Value("string") for f in (*CONTENT_FIELDS, *NOTES)})
NUM_LISTED = 10  # bad rows that the log names one by one
BROKEN = "a line that cannot be read"


def own_columns(rows: RawRows, adapter: ColumnAdapter, purpose: Purpose) -> list[str]:
    """The names of what rows carry beside ``SCHEMA``: reward functions, in step 3, want it."""
    return packed_names(rows.columns, adapter) if purpose == "rlhf" else []


def normalised_rows(
    rows: RawRows, adapter: ColumnAdapter, purpose: Purpose
) -> Iterator[dict[str, Optional[str]]]:
    """A row of ``SCHEMA``, and of ``own_columns``, for every line, in order.

    An unreadable one has no content and no key.
    """
    own, nothing = own_columns(rows, adapter, purpose), Example("").to_row()
    for line in rows:
        if line.row is None:
            yield {
                **dict.fromkeys(own),
                **nothing,
                "key": "",
                "problem": BROKEN,
                "fault": line.fault,
                "where": line.where,
            }
            continue
        row = normalise(line.row, adapter, purpose)
        where = line.where if row["problem"] else ""
        yield {**pack(line.row, own), **row, "fault": "", "where": where}


def normalised_table(rows: RawRows, adapter: ColumnAdapter, purpose: Purpose) -> Dataset:
    """``normalised_rows`` as a table: on disk and made once, or in memory where the source is."""
    own = own_columns(rows, adapter, purpose)
    schema = Features({**SCHEMA, **dict.fromkeys(own, Value("string"))})
    if rows.in_memory:
        return Dataset.from_list(list(normalised_rows(rows, adapter, purpose)), features=schema)
    content = repr([rows.stamp, rows.name, adapter, purpose, list(schema)])
    return kept_on_disk(content, schema, lambda: normalised_rows(rows, adapter, purpose))


def judge(name: str, rows: Dataset, on_bad_row: str, flag: str, hint: str = "") -> None:
    """Warn of the bad rows in a table of ``SCHEMA`` and list the first, or refuse it.

    Raises:
        UserError: naming place and remedy, for a bad row that ``on_bad_row`` does not let pass, or
            where no row is left.
    """
    bad, listed = Counter(), []
    for row in iterate(rows, ("problem", "fault", "where")):
        if not row["problem"]:
            continue
        refuse(row, on_bad_row, flag)
        bad[row["problem"]] += 1
        if len(listed) < NUM_LISTED:
            why = row["fault"].removesuffix("; fix it") or row["problem"]
            listed.append(f"{row['where']}: {why}")
    if not bad:
        return
    why = ", ".join(f"{count} with {problem}" for problem, count in bad.items())
    if bad.total() == len(rows):
        first = listed[0].partition(": ")[0]
        raise UserError(f"{flag}: {name} has no usable row: {why}{hint}; look at {first}")
    logger.warning(
        "%s: dropped %d of %d rows (%s); %s: %s",
        *(name, bad.total(), len(rows), why),
        *("the first ten" if bad.total() > len(listed) else "namely", "; ".join(listed)),
    )


def refuse(row: dict[str, str], on_bad_row: str, flag: str) -> None:
    """Raise ``UserError`` for a bad row of ``SCHEMA`` that ``--on_bad_row`` does not let pass."""
    if on_bad_row == "error" or (on_bad_row == "auto" and row["fault"]):
        raise broken_line(flag, row["where"], row["fault"] or row["problem"])


def iterate(
    rows: Dataset, columns: tuple[str, ...], batch_size: int = 1000
) -> Iterator[dict[str, Any]]:
    """The rows' values in ``columns``, decoded a batch at a time: never a whole column."""
    chosen = rows.select_columns(list(columns)).with_format("arrow")
    for batch in chosen.iter(batch_size) if len(rows) else ():
        yield from batch.to_pylist()


def flags_of(rows: Dataset, column: str) -> np.ndarray:
    """(number of rows,) bool: where a text column is not empty."""
    found = (bool(row[column]) for row in iterate(rows, (column,)))
    return np.fromiter(found, dtype=bool, count=len(rows))
