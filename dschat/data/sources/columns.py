"""A row's own columns, on their way to the reward functions of step 3.

Comes in: raw rows. Goes out: the same values beside the prompts they belong to. On the way each
column is a column of the tables, under a name that cannot be one of ours, and each value a JSON
text: so that one schema holds text, numbers, lists and objects, whatever the sources. Must not know
what columns mean, but for the one that is the prompt.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Optional

from dschat.data.sources.known_datasets import ColumnAdapter

_MARK = "column: "


def packed_names(columns: Iterable[str], adapter: ColumnAdapter) -> list[str]:
    """The tables' names for a source's own ``columns``: all but the one that is the prompt.

    A dialogue goes along whole, since it holds the answer too.
    """
    return [_MARK + column for column in columns if column != adapter.prompt]


def is_packed(name: str) -> bool:
    """Whether a table's column holds a source's own one."""
    return name.startswith(_MARK)


def pack(row: Mapping[str, Any], names: Iterable[str]) -> dict[str, Optional[str]]:
    """The values of a raw row under ``names``, as JSON; None where it has none.

    What JSON cannot hold (a date, bytes) becomes text.
    """
    values = {name: row.get(name.removeprefix(_MARK)) for name in names}
    return {
        name: None if value is None else json.dumps(value, default=str)
        for name, value in values.items()
    }


def unpack(rows: Sequence[Mapping[str, Any]], columns: Collection[str]) -> dict[str, list[Any]]:
    """Column -> its values in the rows of a table, as they were; None where a row has none."""
    return {column: [_value(row.get(_MARK + column)) for row in rows] for column in columns}


def unpacked_names(names: Iterable[str]) -> set[str]:
    """The sources' own columns among a table's ``names``."""
    return {name.removeprefix(_MARK) for name in names if is_packed(name)}


def _value(packed: Optional[str]) -> Any:
    return None if packed is None else json.loads(packed)
