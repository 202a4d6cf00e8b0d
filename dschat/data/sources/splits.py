"""From data sets to the examples of a step: read, hold some out, blend, cut in three parts.

Comes in: ``--data_path`` and its relatives. Goes out: for one step, its training rows and held-out
rows, every row an ``Example``, whatever the source was called and however its columns were. Must
not know tokenizers, ranks or models: the result depends on the data and the seed alone, so every
process of any number computes the same.

Texts stay on disk: of every row, memory holds a hash and a few flags.
"""

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from typing import Optional

import numpy as np
from datasets import Dataset, concatenate_datasets

from dschat.builtin.arithmetic import arithmetic_rows
from dschat.builtin.chat_rows import builtin_rows
from dschat.config import UserError
from dschat.config.data import DataConfig
from dschat.data.sources.adapters import (
    PURPOSES,
    Example,
    Purpose,
    choose_adapter,
    known_adapter,
    listed,
    require_answers,
)
from dschat.data.sources.known_datasets import ColumnAdapter
from dschat.data.sources.normalize import NOTES, flags_of, iterate, judge, normalised_table
from dschat.data.sources.resolve import RawRows, Splits, read_source, table_rows
from dschat.memory import available_memory

__all__ = [
    "Example",
    "DataSource",
    "cut",
    "load_examples",
    "load_source",
    "open_source",
    "parse_spec",
]

logger = logging.getLogger("dschat")

_ROW_BYTES = 80  # of host memory for a row of a blend: places and hashes, measured
_BUILTIN = {"builtin/chat": builtin_rows, "builtin/arithmetic": arithmetic_rows}


@dataclass(frozen=True)
class DataSource:
    """One source, found and understood, but not read: its weight, splits and columns."""

    name: str
    weight: float
    splits: Splits
    adapter: ColumnAdapter
    flag: str

    def table(self, rows: RawRows, purpose: Purpose, on_bad_row: str) -> Dataset:
        """The rows that have a usable prompt, normalised for ``purpose``: a table of ``SCHEMA``.

        Rows that only ``purpose`` cannot use keep their place (``problem`` says why), so that the
        three parts do not depend on the purpose.

        Raises:
            UserError: a bad row that ``--on_bad_row`` does not let pass, or no usable row at all.
        """
        table = normalised_table(rows, self.adapter, purpose)
        named = self.adapter.prompt or self.adapter.messages
        hint = "" if named else "; name it with --prompt_column"
        hint += f" (it has: {listed(rows.columns)})"
        judge(self.name, table, on_bad_row, self.flag, hint)
        keep = flags_of(table, "key")
        return table if keep.all() else table.select(np.flatnonzero(keep))


def load_examples(
    config: DataConfig, purpose: Purpose, seed: Optional[int] = None
) -> tuple[Dataset, Dataset]:
    """The training and held-out examples of one step, as tables of ``Example.to_row`` rows (of
    step 3 with the columns that each row had besides, see ``columns``).

    Rows are held out first, then blended (weight w: every row of that source stands w times, a
    fraction being a seeded choice), then cut in three by ``--data_split``. Rows with the same
    prompt (for a dialogue: the same opening) stay together in all of it, so step 3's prompts are
    new to steps 1 and 2. A row is placed by a hash of (seed, prompt): the parts are the same
    whatever the purpose, the order of calls or the number of processes.

    Raises:
        UserError: unreadable or empty data, a missing column, or a part without rows.
    """
    seed = config.seed if seed is None else seed
    sources = [load_source(spec, config, purpose) for spec in config.data_path]
    tables = [s.table(s.splits.train, purpose, config.on_bad_row) for s in sources]
    held_out, held_keys = _hold_out(config, sources, tables, purpose, seed)
    pairs = zip(sources, tables, strict=True)
    blend = concatenate_datasets([_weighted(s, t, held_keys, seed) for s, t in pairs])
    parts = np.array(_cut(key_hashes(blend, f"split:{seed}"), config.split_weights), dtype=int)
    step = PURPOSES.index(purpose)
    train = _usable(blend.select(np.flatnonzero(parts == step)))
    if not len(train):
        raise no_rows(config.data_split, step, f"the {len(blend)}")
    held_out = _usable(held_out)
    chosen = np.random.default_rng(seed).permutation(len(held_out))[: config.max_eval_samples]
    logger.info(
        "data for step %d: %d of %d training rows, %d of %d held-out rows",
        *(step + 1, len(train), len(blend), len(chosen), len(held_out)),
    )
    return train, held_out.select(sorted(chosen.tolist()))


def no_rows(data_split: str, step: int, which: str) -> UserError:
    """What is said where the part of ``step`` (from 0) is empty."""
    return UserError(
        f"--data_split {data_split} leaves step {step + 1} none of {which} training rows; give it "
        "a larger share or more data"
    )


def load_source(
    spec: str, config: DataConfig, purpose: Purpose, flag: str = "--data_path"
) -> DataSource:
    """Find one ``NAME[:WEIGHT]``, choose its columns and see that ``purpose`` can use them.

    Raises:
        UserError: it cannot be found or read, or it lacks a column.
    """
    source = open_source(spec, config, flag)
    columns = source.splits.train.columns
    require_answers(source.name, source.adapter, purpose, columns, flag)
    return source


def open_source(spec: str, config: DataConfig, flag: str = "--data_path") -> DataSource:
    """``load_source`` for no step in particular: it may lack the answers that one needs."""
    name, weight = parse_spec(spec, flag)
    if name.startswith("builtin/"):
        splits = _builtin(name, flag)
    else:
        known = known_adapter(name)
        lies_at = name if os.path.exists(name) or not known else known.source or name
        eval_split = known.eval_split if known else None
        splits = read_source(
            lies_at,
            flag,
            streaming=config.streaming,
            eval_split=eval_split,
            skip_broken=config.on_bad_row == "skip",
        )
    adapter = choose_adapter(name, splits.train.columns, config, flag)
    return DataSource(name, weight, splits, adapter, flag)


def parse_spec(spec: str, flag: str = "--data_path") -> tuple[str, float]:
    """Split ``NAME[:WEIGHT]``; a number after the last colon, unless a file is called so."""
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


def cut(keys: Iterable[str], shares: Sequence[float], salt: str) -> list[int]:
    """Give every row a part, 0 to len(shares) - 1, in about these shares; equal keys share one.

    Keys are laid in the order of their salted hashes (a seeded permutation that depends on nothing
    else), and each goes to the part in which the middle of its rows falls.
    """
    return _cut(np.array([key_hash(key, salt) for key in keys], dtype=np.uint64), shares)


def key_hash(key: str, salt: str) -> int:
    """64 bits of a salted hash; equal keys have equal ones, others do not, for all we shall see."""
    return int.from_bytes(blake2b(f"{salt}:{key}".encode()).digest()[:8], "big")


def key_hashes(rows: Dataset, salt: str) -> np.ndarray:
    """(number of rows,) uint64: ``key_hash`` of every row's key."""
    hashes = (key_hash(row["key"], salt) for row in iterate(rows, ("key",)))
    return np.fromiter(hashes, dtype=np.uint64, count=len(rows))


def _cut(hashes: np.ndarray, shares: Sequence[float]) -> list[int]:
    _, places, sizes = np.unique(hashes, return_inverse=True, return_counts=True)
    middles = np.cumsum(sizes) - sizes / 2
    ends = np.cumsum(shares) / np.sum(shares) * len(hashes)
    return np.searchsorted(ends, middles)[places].tolist()


@cache
def _builtin_tables(name: str) -> dict[str, Dataset]:
    return {split: Dataset.from_list(rows) for split, rows in _BUILTIN[name]().items()}


def _builtin(name: str, flag: str) -> Splits:
    if name not in _BUILTIN:
        sets = " and ".join(_BUILTIN)
        raise UserError(f"{flag}: there is no {name}; the built-in data sets are {sets}")
    tables = _builtin_tables(name)
    return Splits(table_rows(name, tables["train"]), table_rows(name, tables["eval"]))


def named_held_out(config: DataConfig, purpose: Purpose) -> list[tuple[DataSource, RawRows]]:
    """The sources of ``--eval_data_path``, each with the split that is meant: its own held-out one,
    or all it has.
    """
    flag = "--eval_data_path"
    named = [load_source(spec, config, purpose, flag) for spec in config.eval_data_path or ()]
    return [(source, source.splits.eval or source.splits.train) for source in named]


def _hold_out(
    config: DataConfig,
    sources: list[DataSource],
    tables: list[Dataset],
    purpose: Purpose,
    seed: int,
) -> tuple[Dataset, Optional[np.ndarray]]:
    """The held-out rows of all sources, and the hashes of keys that training must leave to them."""
    policy = config.on_bad_row
    if config.eval_data_path is not None:
        named = named_held_out(config, purpose)
        return concatenate_datasets([s.table(rows, purpose, policy) for s, rows in named]), None
    held_tables, held_keys = [], []
    for source, table in zip(sources, tables, strict=True):
        if source.splits.eval:
            held_tables.append(source.table(source.splits.eval, purpose, policy))
            continue
        hashes = key_hashes(table, f"eval:{seed}")
        parts = _cut(hashes, (config.eval_fraction, 1 - config.eval_fraction))
        held = np.flatnonzero(np.array(parts, dtype=int) == 0)
        held_keys.append(hashes[held])
        held_tables.append(table.select(held))
    keys = np.unique(np.concatenate(held_keys)) if held_keys else None
    return concatenate_datasets(held_tables), keys


def _weighted(
    source: DataSource, table: Dataset, held_keys: Optional[np.ndarray], seed: int
) -> Dataset:
    """A source's training rows, each as often as its weight says.

    Raises:
        UserError: this host's memory cannot hold so many.
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
    keep = np.flatnonzero(~flags_of(rows, "problem"))
    return rows.select(keep).remove_columns(list(NOTES))
