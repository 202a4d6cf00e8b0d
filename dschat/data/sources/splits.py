"""Loads a step's training and held-out examples: reads, holds out, blends and splits the sources.

The result depends on the data flags and the seed alone, so all processes compute the same, however
many there are.

Texts stay on disk: memory holds two hashes and two flags per row.
"""

import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from hashlib import blake2b
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np
from datasets import Dataset, Features, Value, concatenate_datasets

from dschat.builtin import verifiers_tasks
from dschat.builtin.arithmetic import addition_rows, arithmetic_rows
from dschat.builtin.chat_rows import builtin_rows
from dschat.builtin.reasoning_gym import COLUMNS, settings_of, task_rows
from dschat.config import SFTConfig, UserError
from dschat.config.data import DataConfig, look_up
from dschat.config.fields import AUTO
from dschat.data.sources.adapters import PURPOSES, Example, Purpose, normalize
from dschat.data.sources.known_datasets import (
    ColumnAdapter,
    checked_label,
    choose_adapter,
    known_adapter,
    listed,
)
from dschat.data.sources.readers import Line
from dschat.data.sources.resolve import RawRows, Splits, broken_line, read_source, table_rows
from dschat.data.sources.tables import iterate, made_table
from dschat.data.sources.turns import unread_keys

logger = logging.getLogger("dschat")

# `problem`: why the step cannot use the row; `fault`: why it could not be read; `where`: its place
# in the source, for rows with a problem or a fault; `plain`: not empty for a prompt that is text
# without a chat's marks; `unread`: keys of turns that nothing reads.
NOTES = ("key", "problem", "plain", "unread", "fault", "where")
EXAMPLES = Features({"example": Value("string")})  # `Example.to_row`
SCHEMA = Features({name: Value("string") for name in (*EXAMPLES, *NOTES)})
NUM_LISTED = 10  # bad rows that the log lists individually
BROKEN = "an unreadable line"
# of a row: hashes of its key, for holding out and for the steps; whether it has a key, and whether
# the step can use it
_PLACE = np.dtype([("eval", "u8"), ("split", "u8"), ("has_key", "?"), ("usable", "?")])
_NO_KEYS = np.zeros(0, dtype=np.uint64)
_BUILTIN = {
    "builtin/chat": builtin_rows,
    "builtin/arithmetic": arithmetic_rows,
    "builtin/addition": addition_rows,
}


@dataclass(frozen=True)
class DataSource:
    """One source, resolved but unread: its weight, splits and columns."""

    name: str
    weight: float
    splits: Splits
    adapter: ColumnAdapter
    flag: str

    def is_split(self, config: DataConfig) -> bool:
        """Whether its rows are split between the steps; else every step has all of them."""
        has_worse = self.adapter.rejected or self.adapter.answers or self.adapter.label
        return config.data_split != AUTO or bool(has_worse)

    def placed(self, rows: RawRows, config: DataConfig, purpose: Purpose) -> "PlacedRows":
        """The rows with a usable prompt, normalized for ``purpose``.

        Rows that only ``purpose`` cannot use stay (``problem`` says why), so that the split over
        the three steps is the same for each.

        Raises:
            UserError: a bad row that ``--on_bad_row`` does not allow, or no usable rows.
        """
        table = normalized_table(rows, self.adapter, purpose)
        named = self.adapter.prompt or self.adapter.messages
        hint = "" if named else "; name it with --columns prompt=COLUMN"
        hint += f" (it has: {listed(rows.columns)})"
        report_bad_rows(self.name, table, config.on_bad_row, self.flag, hint)
        if config.text_as is None and rows is self.splits.train:
            num_plain = sum(bool(row["plain"]) for row in iterate(table, ("plain",)))
            if num_plain:
                logger.warning(
                    "%s: %d of %d prompts are text without a chat's marks, and are trained without "
                    "the chat template, in which dschat chat and serve ask; --text_as chat makes "
                    "them chats, --text_as raw keeps them as they are",
                    *(self.name, num_plain, len(table)),
                )
        salts = f"eval:{config.seed}", f"split:{config.seed}"
        places = (
            (*(key_hash(row["key"], salt) for salt in salts), row["key"] != "", not row["problem"])
            for row in iterate(table, ("key", "problem"))
        )
        placed = PlacedRows(table, np.fromiter(places, _PLACE, len(table)))
        has_key = placed.places["has_key"]
        return placed if has_key.all() else placed.take(np.flatnonzero(has_key))


class PlacedRows(NamedTuple):
    """Rows of ``SCHEMA`` on disk, and in memory what decides where each goes."""

    table: Dataset
    places: np.ndarray  # (rows,) of `_PLACE`

    def take(self, rows: np.ndarray) -> "PlacedRows":
        return PlacedRows(self.table.select(rows), self.places[rows])

    def usable(self) -> Dataset:
        """The examples that the step can use."""
        rows = np.flatnonzero(self.places["usable"])
        return self.table.select(rows).select_columns(list(EXAMPLES))


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
    rows = [source.placed(source.splits.train, config, purpose) for source in sources]
    held, held_keys = _hold_out(config, sources, rows, purpose)
    weighted = [_weighted(s, r, held_keys, seed) for s, r in zip(sources, rows, strict=True)]
    blend, step = _joined(weighted), PURPOSES.index(purpose)
    is_split = np.repeat([s.is_split(config) for s in sources], [len(w.places) for w in weighted])
    parts = np.full(len(blend.places), step)
    parts[is_split] = cut(blend.places["split"][is_split], config.split_weights)
    train, held_out = blend.take(np.flatnonzero(parts == step)).usable(), held.usable()
    if not len(train):
        raise UserError(
            f"--data_split {config.data_split} leaves step {step + 1} none of the {len(parts)} "
            "training rows (those with the same prompt stay together); give it a larger share or "
            "more data"
        )
    others = int((parts != step).sum())
    sample = np.random.default_rng(seed).permutation(len(held_out))[: config.max_eval_samples]
    logger.info(
        "data for step %d: %d of %d training rows%s, %d of %d held-out rows",
        *(step + 1, len(train), len(parts)),
        f" ({others} are for the other steps; see --data_split)" if others else "",
        *(len(sample), len(held_out)),
    )
    return train, held_out.select(sorted(sample.tolist()))


def load_source(
    spec: str, config: DataConfig, purpose: Purpose, flag: str = "--data_path"
) -> DataSource:
    """Resolve one ``NAME[:WEIGHT]``, choose its columns and check that ``purpose`` can use them.

    Raises:
        UserError: the source cannot be found or read, or lacks a column.
    """
    source = open_source(spec, config, flag)
    adapter, columns = source.adapter, listed(source.splits.train.columns)
    needs = {
        "sft": {"chosen": adapter.chosen or adapter.sft or adapter.messages},
        "reward": {"chosen": adapter.chosen, "rejected": adapter.rejected},
        "rlhf": {},
    }[purpose]
    for role, column in needs.items():
        if not (column or adapter.answers or adapter.label):
            step = PURPOSES.index(purpose) + 1
            raise UserError(
                f"{flag}: {source.name} has no {role} answers, which step {step} needs; "
                f"name their column with --columns {role}=COLUMN (it has: {columns})"
            )
    if adapter.label and purpose == "reward" and getattr(config, "loss", "") != "kto":
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
    elif name.startswith("reasoning_gym/"):
        splits = _reasoning_gym(name, config, flag)
    elif name.startswith(verifiers_tasks.VERIFIERS):
        rows = Dataset.from_list(list(verifiers_tasks.task_rows(name)))
        splits = Splits(table_rows(name, rows))
    else:
        known = known_adapter(name) or ColumnAdapter()
        found = name if os.path.exists(name) else known.source or name
        splits = read_source(found, flag, config, eval_split=known.eval_split)
    adapter = choose_adapter(name, splits.train.columns, config, flag)
    if isinstance(config, SFTConfig) and config.train_on == "auto" and not config.train_on_prompt:
        is_completion = str(adapter.chosen).lower() == "completion"
        adapter = replace(adapter, completion_alone=is_completion)
    adapter = checked_label(name, adapter, (line.row or {} for line in splits.train))
    if config.text_as:
        adapter = replace(adapter, as_chat=config.text_as == "chat")
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


def cut(hashes: np.ndarray, shares: Sequence[float]) -> np.ndarray:
    """Assign every row a part, 0 to len(shares) - 1, in about these shares; equal hashes share one.

    Hashes are sorted (a permutation seeded by their salt), and each goes to the part into which the
    middle of its rows falls.

    Args:
        hashes: (number of rows,) uint64, of ``key_hash``.

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


def _reasoning_gym(name: str, config: DataConfig, flag: str) -> Splits:
    task = name.partition("/")[2]
    settings = (config.reasoning_gym or {}).get(task, {})
    stamp = f"{name} {settings_of(settings)} {version('reasoning-gym')}"

    @cache
    def made() -> list[Line]:
        rows = enumerate(task_rows(task, settings, flag))
        return [Line(f"{name}, row {number}", row) for number, row in rows]

    return Splits(RawRows(name, [*COLUMNS], stamp, lambda: iter(made())))


def named_held_out(config: DataConfig, purpose: Purpose) -> list[tuple[DataSource, RawRows]]:
    """The sources of ``--eval_data_path``, each with its held-out or else its training split."""
    flag = "--eval_data_path"
    named = [load_source(spec, config, purpose, flag) for spec in config.eval_data_path or ()]
    return [(source, source.splits.eval or source.splits.train) for source in named]


def _hold_out(
    config: DataConfig, sources: list[DataSource], rows: list[PlacedRows], purpose: Purpose
) -> tuple[PlacedRows, np.ndarray]:
    """The held-out rows of all sources, and the key hashes that training must exclude."""
    if config.eval_data_path is not None:
        named = named_held_out(config, purpose)
        return _joined([s.placed(raw, config, purpose) for s, raw in named]), _NO_KEYS
    held, held_keys = [], [_NO_KEYS]
    for source, own in zip(sources, rows, strict=True):
        if source.splits.eval:
            held.append(source.placed(source.splits.eval, config, purpose))
            continue
        parts = cut(own.places["eval"], (config.eval_fraction, 1 - config.eval_fraction))
        held.append(own.take(np.flatnonzero(parts == 0)))
        held_keys.append(held[-1].places["eval"])
    return _joined(held), np.concatenate(held_keys)


def _joined(rows: list[PlacedRows]) -> PlacedRows:
    tables, places = zip(*rows, strict=True)
    return PlacedRows(concatenate_datasets(list(tables)), np.concatenate(places))


def _weighted(
    source: DataSource, placed: PlacedRows, held_keys: np.ndarray, seed: int
) -> PlacedRows:
    """A source's training rows, each repeated according to its weight."""
    rows = np.flatnonzero(~np.isin(placed.places["eval"], held_keys))
    num_rows = round(source.weight * len(rows))
    copies, rest = divmod(num_rows, len(rows)) if len(rows) else (0, 0)
    drawn = np.random.default_rng(seed).permutation(len(rows))[:rest]
    return placed.take(np.concatenate([np.tile(rows, copies), rows[np.sort(drawn)]]))


# -- normalized rows


def normalized_rows(
    rows: RawRows, adapter: ColumnAdapter, purpose: Purpose
) -> Iterator[dict[str, Any]]:
    """A row of ``SCHEMA`` for every line, in order.

    The row of an unreadable line has no content and no key.
    """
    unreadable = {**Example("").to_row(), "key": "", "problem": BROKEN, "plain": ""}
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
    return made_table(SCHEMA, made, content if rows.stamp else "")


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
