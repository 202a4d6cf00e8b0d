"""Packs a row's other columns into the tables, for the reward functions of step 3.

Each column gets a prefixed name, which cannot clash with the tables' own, and each value is stored
as JSON: so one schema holds text, numbers, lists and objects of any source.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Optional

from dschat.data.sources.known_datasets import ColumnAdapter

_PREFIX = "column: "


def packed_names(columns: Iterable[str], adapter: ColumnAdapter) -> list[str]:
    """The tables' names for a source's ``columns``: all except the prompt.

    A dialogue is kept whole, since it holds the answer too.
    """
    return [_PREFIX + column for column in columns if column != adapter.prompt]


def is_packed(name: str) -> bool:
    """Whether a table's column is a packed column of the source."""
    return name.startswith(_PREFIX)


def pack(row: Mapping[str, Any], names: Iterable[str]) -> dict[str, Optional[str]]:
    """The values of a raw row under ``names``, as JSON; None if absent.

    Values that JSON cannot represent (dates, bytes) become text.
    """
    values = {name: row.get(name.removeprefix(_PREFIX)) for name in names}
    return {
        name: None if value is None else json.dumps(value, default=str)
        for name, value in values.items()
    }


def unpack(rows: Sequence[Mapping[str, Any]], columns: Collection[str]) -> dict[str, list[Any]]:
    """Column -> its original values in the rows of a table; None if a row has none."""
    return {column: [_value(row.get(_PREFIX + column)) for row in rows] for column in columns}


def unpacked_names(names: Iterable[str]) -> set[str]:
    """The original names of the packed columns among a table's ``names``."""
    return {name.removeprefix(_PREFIX) for name in names if is_packed(name)}


def _value(packed: Optional[str]) -> Any:
    return None if packed is None else json.loads(packed)
