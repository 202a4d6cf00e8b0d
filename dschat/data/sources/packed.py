"""Packs the columns of a raw row that no field of an ``Example`` holds.

For the reward functions of step 3 they go into the tables too. Each gets a prefixed name, which
cannot clash with the tables' own, and each value is stored as JSON: so one schema holds text,
numbers, lists and objects of any source.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Optional

from dschat.data.sources.known_datasets import ColumnAdapter

_PACKED = "column: "  # starts the name of a packed column


def packed_names(columns: Iterable[str], adapter: ColumnAdapter) -> list[str]:
    """The tables' names for a source's ``columns``: all except the prompt.

    A dialogue is kept whole, since it holds the answer too.
    """
    return [_PACKED + column for column in columns if column != adapter.prompt]


def is_packed(name: str) -> bool:
    """Whether a table's column is a packed column of the source."""
    return name.startswith(_PACKED)


def pack(row: Mapping[str, Any], names: Iterable[str]) -> dict[str, Optional[str]]:
    """The values of a raw row under ``names``, as JSON; None if absent.

    Values that JSON cannot represent (dates, bytes) become text.
    """
    values = {name: row.get(name.removeprefix(_PACKED)) for name in names}
    return {n: None if v is None else json.dumps(v, default=str) for n, v in values.items()}


def unpack(rows: Sequence[Mapping[str, Any]], columns: Collection[str]) -> dict[str, list[Any]]:
    """Column -> its original values in the rows of a table; None if a row has none."""
    packed = {column: [row.get(_PACKED + column) for row in rows] for column in columns}
    return {
        column: [None if value is None else json.loads(value) for value in values]
        for column, values in packed.items()
    }


def unpacked_names(names: Iterable[str]) -> set[str]:
    """The original names of the packed columns among a table's ``names``."""
    return {name.removeprefix(_PACKED) for name in names if is_packed(name)}
