"""Loads a step's training and held-out examples: reads, holds out, blends and splits the sources.

The result depends on the data flags and the seed alone, so all processes compute the same, however
many there are.

Texts stay on disk: memory holds a hash and a few flags per row.
"""

import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from typing import Any, Optional

import numpy as np
from datasets import Dataset, Features, Value, concatenate_datasets

from dschat.builtin.arithmetic import arithmetic_rows
from dschat.builtin.calculator import calculator_rows
from dschat.builtin.chat_rows import builtin_rows
from dschat.builtin.guess_game import guess_rows
from dschat.config import UserError
from dschat.config.data import DataConfig
from dschat.data.sources.adapters import (
    PURPOSES,
    Example,
    Purpose,
    look_up,
    normalize,
    require_answers,
)
from dschat.data.sources.known_datasets import ColumnAdapter, choose_adapter, known_adapter, listed
from dschat.data.sources.resolve import RawRows, Splits, broken_line, read_source, table_rows
from dschat.data.sources.turns import unread_keys
from dschat.data.tables import iterate, made_table, non_empty
from dschat.memory import available_memory

logger = logging.getLogger("dschat")

# `problem`: why the step cannot use the row; `fault`: why it could not be read; `where`: its place
# in the source, for rows with a problem or a fault; `unread`: keys of turns that nothing reads.
NOTES = ("key", "problem", "unread", "fault", "where")
EXAMPLES = Features({"example": Value("string")})  # `Example.to_row`
SCHEMA = Features({name: Value("string") for name in (*EXAMPLES, *NOTES)})
NUM_LISTED = 10  # bad rows that the log lists individually
BROKEN = "an unreadable line"
_ROW_BYTES = 80  # host memory per row of a blend, for indices and hashes; measured
_BUILTIN = {
    "builtin/chat": builtin_rows,
    "builtin/arithmetic": arithmetic_rows,
    "builtin/calculator": calculator_rows,
    "builtin/guess": guess_rows,
}


@dataclass(frozen=True)
class DataSource:
    """One source, resolved but unread: its weight, splits and columns."""

    name: str
    weight: float
    splits: Splits
    adapter: ColumnAdapter
    flag: str

    def table(self, rows: RawRows, purpose: Purpose, on_bad_row: str) -> Dataset:
        """The rows with a usable prompt, normalized for ``purpose``: a table of ``SCHEMA``.

        Rows that only ``purpose`` cannot use stay (``problem`` says why), so that the split over
        the three steps is the same for each.

        Raises:
            UserError: a bad row that ``--on_bad_row`` does not allow, or no usable rows.
        """
        table = normalized_table(rows, self.adapter, purpose)
        named = self.adapter.prompt or self.adapter.messages
        hint = "" if named else "; name it with --prompt_column"
        hint += f" (it has: {listed(rows.columns)})"
        report_bad_rows(self.name, table, on_bad_row, self.flag, hint)
        keep = non_empty(table, "key")
        return table if keep.all() else table.select(np.flatnonzero(keep))


def load_examples(config: DataConfig, purpose: Purpose) -> tuple[Dataset, Dataset]:
    """The training and held-out examples of one step, as tables of ``Example.to_row`` rows; in
    step 3 also with each row's other columns, see ``adapters.py``.

    Rows are first held out, then blended (weight w repeats every row of a source w times; a
    fraction is a seeded choice), then split over the three steps by ``--data_split``. Rows with the
    same prompt (dialogues: the same opening) stay together, so step 3's prompts are new to steps 1
    and 2. A hash of (seed, prompt) places each row: the split is the same for every purpose, order
    of calls and number of processes.

    Raises:
        UserError: unreadable or empty data, a missing column, or a step without rows.
    """
    seed = config.seed
    sources = [load_source(spec, config, purpose) for spec in config.data_path]
    tables = [s.table(s.splits.train, purpose, config.on_bad_row) for s in sources]
    held_out, held_keys = _hold_out(config, sources, tables, purpose)
    blend = concatenate_datasets(
        [_weighted(s, t, held_keys, seed) for s, t in zip(sources, tables, strict=True)]
    )
    parts = cut(key_hashes(blend, f"split:{seed}"), config.split_weights)
    step = PURPOSES.index(purpose)
    train = _usable(blend.select(np.flatnonzero(parts == step)))
    if not len(train):
        raise no_rows(config.data_split, step, f"the {len(blend)}")
    held_out = _usable(held_out)
    sample = np.random.default_rng(seed).permutation(len(held_out))[: config.max_eval_samples]
    logger.info(
        "data for step %d: %d of %d training rows, %d of %d held-out rows",
        *(step + 1, len(train), len(blend), len(sample), len(held_out)),
    )
    return train, held_out.select(sorted(sample.tolist()))


def no_rows(data_split: str, step: int, which: str) -> UserError:
    """The error for a ``step`` (from 0) whose share of the rows is empty."""
    return UserError(
        f"--data_split {data_split} leaves step {step + 1} none of {which} training rows (those "
        "with the same prompt stay together); give it a larger share or more data"
    )


def load_source(
    spec: str, config: DataConfig, purpose: Purpose, flag: str = "--data_path"
) -> DataSource:
    """Resolve one ``NAME[:WEIGHT]``, choose its columns and check that ``purpose`` can use them.

    Raises:
        UserError: the source cannot be found or read, or lacks a column.
    """
    source = open_source(spec, config, flag)
    columns = source.splits.train.columns
    require_answers(source.name, source.adapter, purpose, columns, flag)
    if source.adapter.unpaired and purpose == "reward" and getattr(config, "loss", "") != "kto":
        raise UserError(
            f"{flag}: {source.name} labels single answers, which step 2 compares in pairs; add "
            "--loss kto, which trains the policy on them"
        )
    return source


def open_source(spec: str, config: DataConfig, flag: str = "--data_path") -> DataSource:
    """``load_source`` for any step: does not check for the answers that a step needs."""
    name, weight = parse_spec(spec, flag)
    if name.startswith("builtin/"):
        if name not in _BUILTIN:
            sets = " or ".join(_BUILTIN)
            raise UserError(f"{flag}: no built-in data set {name}; choose {sets}")
        splits = _builtin(name)
    else:
        known = known_adapter(name)
        splits = read_source(
            name if os.path.exists(name) or not known else known.source or name,
            flag,
            streaming=config.streaming,
            eval_split=known.eval_split if known else None,
            skip_broken=config.on_bad_row == "skip",
        )
    adapter = choose_adapter(name, splits.train.columns, config, flag)
    return DataSource(name, weight, splits, adapter, flag)


def parse_spec(spec: str, flag: str = "--data_path") -> tuple[str, float]:
    """Split ``NAME[:WEIGHT]`` at the last colon, if a number follows and no such file exists."""
    name, colon, tail = spec.rpartition(":")
    try:
        weight = float(tail)
    except ValueError:
        return spec, 1.0
    if not colon or not name or os.path.isfile(os.path.expanduser(spec)):
        return spec, 1.0
    if not 0 < weight < float("inf"):
        raise UserError(f"{flag} {spec}: the weight after the colon must be a number above 0")
    return name, weight


def key_hash(key: str, salt: str) -> int:
    """64 bits of a salted hash: BLAKE2b of "salt:key"."""
    return int.from_bytes(blake2b(f"{salt}:{key}".encode()).digest()[:8], "big")


def key_hashes(rows: Dataset, salt: str) -> np.ndarray:
    """(number of rows,) uint64: ``key_hash`` of every row's key."""
    hashes = (key_hash(row["key"], salt) for row in iterate(rows, ("key",)))
    return np.fromiter(hashes, dtype=np.uint64, count=len(rows))


def cut(hashes: np.ndarray, shares: Sequence[float]) -> np.ndarray:
    """Assign every row a part, 0 to len(shares) - 1, in about these shares; equal hashes share one.

    Hashes are sorted (a permutation seeded by their salt), and each goes to the part into which the
    middle of its rows falls.

    Args:
        hashes: (number of rows,) uint64, of ``key_hashes``.

    Returns:
        (number of rows,) int64.
    """
    _, places, sizes = np.unique(hashes, return_inverse=True, return_counts=True)
    middles = np.cumsum(sizes) - sizes / 2
    ends = np.cumsum(shares) / np.sum(shares) * len(hashes)
    return np.searchsorted(ends, middles)[places]


@cache
def _builtin(name: str) -> Splits:
    rows = _BUILTIN[name]()
    train, held_out = (Dataset.from_list(rows[split]) for split in ("train", "eval"))
    return Splits(table_rows(name, train), table_rows(name, held_out))


def named_held_out(config: DataConfig, purpose: Purpose) -> list[tuple[DataSource, RawRows]]:
    """The sources of ``--eval_data_path``, each with its held-out or else its training split."""
    flag = "--eval_data_path"
    named = [load_source(spec, config, purpose, flag) for spec in config.eval_data_path or ()]
    return [(source, source.splits.eval or source.splits.train) for source in named]


def _hold_out(
    config: DataConfig, sources: list[DataSource], tables: list[Dataset], purpose: Purpose
) -> tuple[Dataset, Optional[np.ndarray]]:
    """The held-out rows of all sources, and the key hashes that training must exclude."""
    policy = config.on_bad_row
    if config.eval_data_path is not None:
        named = named_held_out(config, purpose)
        return concatenate_datasets([s.table(rows, purpose, policy) for s, rows in named]), None
    held_tables, held_keys = [], []
    for source, table in zip(sources, tables, strict=True):
        if source.splits.eval:
            held_tables.append(source.table(source.splits.eval, purpose, policy))
            continue
        hashes = key_hashes(table, f"eval:{config.seed}")
        parts = cut(hashes, (config.eval_fraction, 1 - config.eval_fraction))
        held_rows = np.flatnonzero(parts == 0)
        held_keys.append(hashes[held_rows])
        held_tables.append(table.select(held_rows))
    keys = np.unique(np.concatenate(held_keys)) if held_keys else None
    return concatenate_datasets(held_tables), keys


def _weighted(
    source: DataSource, table: Dataset, held_keys: Optional[np.ndarray], seed: int
) -> Dataset:
    """A source's training rows, each repeated according to its weight.

    Raises:
        UserError: so many rows do not fit in host memory.
    """
    rows = np.arange(len(table))
    if held_keys is not None and len(held_keys):
        rows = rows[~np.isin(key_hashes(table, f"eval:{seed}"), held_keys)]
    num_rows = round(source.weight * len(rows))
    num_bytes = num_rows * _ROW_BYTES
    if source.weight > 1 and num_bytes > (free := available_memory()):
        raise UserError(
            f"{source.flag} {source.name}:{source.weight:g} makes {num_rows:,} rows of "
            f"{len(rows):,}: {num_bytes / 2**30:,.0f} GiB of host memory, of which "
            f"{free / 2**30:,.0f} GiB are free; lower the weight"
        )
    copies, rest = divmod(num_rows, len(rows)) if len(rows) else (0, 0)
    drawn = np.random.default_rng(seed).permutation(len(rows))[:rest]
    return table.select(np.concatenate([np.tile(rows, copies), rows[np.sort(drawn)]]))


def _usable(rows: Dataset) -> Dataset:
    keep = np.flatnonzero(~non_empty(rows, "problem"))
    return rows.select(keep).select_columns(list(EXAMPLES))


# -- normalized rows


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
    # repr of a function has its address, which differs between processes
    stable = {**vars(adapter), "rewrite": adapter.rewrite and adapter.rewrite.__name__}
    content = repr([rows.stamp, rows.name, stable, purpose])
    made = normalized_rows(rows, adapter, purpose)
    return made_table(SCHEMA, made, "" if rows.in_memory else content)


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
