"""Resolves a name to its splits: file, folder, glob pattern, saved data set or hub name.

Each split is a ``RawRows``: every iteration reads the source again from its first row, one row at a
time. A name that cannot be read raises a one-line ``UserError``.
"""

import glob
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Optional

import datasets
from datasets import Dataset, DatasetDict

from dschat.config import UserError
from dschat.config.data import DataConfig
from dschat.config.errors import first_line
from dschat.data.sources.readers import SUFFIXES, TEXT_SUFFIX, Line, kind_of, read_lines
from dschat.data.sources.tables import quiet

EVAL_SPLITS = ("test", "validation", "eval", "valid", "val", "dev", "test_prefs")
_SPLIT_NAME = re.compile(r"(train|test|validation|eval|valid|val|dev)(?![a-z])", re.IGNORECASE)
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[^/]+)?")
_SAVED_MARKS = ("dataset_dict.json", "state.json")  # of datasets.save_to_disk
_NUM_PEEKED = 1000  # first rows that determine a file's columns
_SCRIPT_FREE = "refs/convert/parquet"  # the hub's Parquet copy of data sets that were scripts


@dataclass
class RawRows:
    """One split of a source, unread; iterating it reads it from the start.

    ``stamp`` identifies the content: it changes with a file's size or modification time, and is
    None for what is no file: a table in memory.
    """

    name: str
    columns: list[str]
    stamp: Optional[str]
    lines: Callable[[], Iterator[Line]] = field(repr=False)

    def __iter__(self) -> Iterator[Line]:
        return self.lines()


@dataclass
class Splits:
    """The training rows of a source, and its own held-out rows if it has any."""

    train: RawRows
    eval: Optional[RawRows] = None


def looks_like_file(name: str) -> bool:
    """Whether ``name`` is a local path: it exists, or it is not a valid hub name."""
    path = os.path.expanduser(name)
    return (
        os.path.exists(path)
        or kind_of(name) in (*SUFFIXES, TEXT_SUFFIX)
        or name.startswith(("/", "./", "../", "~"))
        or name.endswith("/")
        or glob.has_magic(name)
    )


def read_source(
    name: str,
    flag: str,
    config: DataConfig,
    allow_text: bool = False,
    eval_split: str = EVAL_SPLITS[0],
) -> Splits:
    """The splits of a source; a hub name may be NAME:CONFIG. ``allow_text``: accept .txt files;
    ``eval_split``: the held-out split to prefer.

    Raises:
        UserError: the source is missing, of the wrong kind or empty; or one of its first rows
            cannot be read, unless ``--on_bad_row skip``.
    """
    eval_splits = (eval_split, *EVAL_SPLITS)
    if not looks_like_file(name):
        hub_name, _, config_name = name.partition(":")
        if not _HUB_NAME.fullmatch(name):
            raise UserError(
                f"{flag}: {name!r} is neither a file nor a valid hub name; check the name"
            )
        splits = _load(hub_name, config_name or None, flag)
        return _table_splits(hub_name, splits, flag, eval_splits)
    path = os.path.expanduser(name)
    if any(os.path.isfile(os.path.join(path, mark)) for mark in _SAVED_MARKS):
        return _table_splits(name, _load_saved(name, path, flag), flag, eval_splits)
    kinds = (*SUFFIXES, TEXT_SUFFIX) if allow_text else SUFFIXES
    train, held_out = _find_files(name, path, flag, kinds, eval_splits)
    rows = partial(_file_rows, name, flag=flag, config=config)
    return Splits(rows(train), rows(held_out) if held_out else None)


def table_rows(name: str, table: Dataset) -> RawRows:
    """A table of ``datasets`` as ``RawRows``."""

    def lines() -> Iterator[Line]:
        row = 0
        for batch in table.iter(batch_size=256):
            for values in zip(*batch.values(), strict=True):
                row += 1
                made = dict(zip(batch, values, strict=True))
                yield Line(f"{name}, row {row}", made, form="arrow")

    files = [file["filename"] for file in table.cache_files]
    # NOTE a saved table's fingerprint is what its folder says, whatever its files hold.
    stats = [(stat.st_size, stat.st_mtime_ns) for stat in map(os.stat, files)]
    stamp = f"{table._fingerprint} {stats}" if files else None
    return RawRows(name, table.column_names, stamp, lines)


def _load(name: str, config_name: Optional[str], flag: str) -> DatasetDict:
    """The splits of a hub data set."""
    load = partial(datasets.load_dataset, name, config_name)
    try:
        with quiet():
            try:
                return load()
            except RuntimeError as error:
                if "scripts are no longer supported" not in str(error):
                    raise
                return load(revision=_SCRIPT_FREE)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise UserError(
            f"{flag}: {name} is neither a local file nor a data set that the hub can load "
            f"({first_line(error).rstrip('.')}); check the name"
        ) from error


def broken_line(flag: str, where: str, fault: str, can_skip: bool = True) -> UserError:
    """The error for a row that is unusable or unreadable and must not be skipped."""
    advice = "fix it, or skip such rows with --on_bad_row skip" if can_skip else "no row is usable"
    return UserError(f"{flag}: {where}: {fault.removesuffix('; fix it')}; {advice}")


def _load_saved(name: str, path: str, flag: str) -> DatasetDict:
    """The splits of a folder that ``datasets.save_to_disk`` wrote."""
    try:
        with quiet():
            saved = datasets.load_from_disk(path)
        splits = saved if isinstance(saved, DatasetDict) else DatasetDict(train=saved)
        for file in (file["filename"] for table in splits.values() for file in table.cache_files):
            if Path(os.path.abspath(path)) not in Path(os.path.abspath(file)).parents:
                raise ValueError(f"it names {file}, which is not in it")
    except Exception as error:  # a damaged folder may raise anything
        raise UserError(
            f"{flag}: {name} looks like a folder of datasets.save_to_disk, but cannot be read "
            f"({first_line(error).rstrip('.')}); save it again"
        ) from error
    return splits


def _find_files(
    name: str, path: str, flag: str, kinds: tuple[str, ...], eval_splits: tuple[str, ...]
) -> tuple[list[str], Optional[list[str]]]:
    """The training files of a file, a folder or a pattern, and a folder's held-out files."""
    if os.path.isfile(path):
        if kind_of(path) not in kinds:
            raise UserError(f"{flag}: {name} is not one of {', '.join(kinds)}; convert it")
        return [path], None
    if os.path.isdir(path):
        parts = _folder_parts(path, kinds)
        train = parts.get("train") or parts.get("")
        if not train:
            raise UserError(
                f"{flag}: the folder {name} has no {'training' if parts else 'data'} files; it "
                f"needs train.*, or any files of {', '.join(kinds)}"
            )
        return train, next((parts[s] for s in eval_splits if s in parts), None)
    if not glob.has_magic(name):
        why = "a pipe or a device, not a file" if os.path.exists(path) else "no such data file"
        raise UserError(f"{flag}: {why}: {name}; check the path")
    files = sorted(filter(os.path.isfile, glob.glob(path, recursive=True)))
    matching = [file for file in files if kind_of(file) in kinds]
    if not matching:
        raise UserError(f"{flag}: {name} matches no file of {', '.join(kinds)}; check the pattern")
    return matching, None


def _folder_parts(path: str, kinds: tuple[str, ...]) -> dict[str, list[str]]:
    """Split -> files, of files or sub-folders named train, test, ...; "" for other files, shards.

    If the files are all in ``data/``, as in a clone of a hub repository, they are read there.
    """
    parts: dict[str, list[str]] = {}
    for base in (Path(path), Path(path) / "data"):
        for entry in sorted(base.iterdir()) if base.is_dir() and not parts else ():
            named = _SPLIT_NAME.match(entry.name)
            split = named.group(1).lower() if named else ""
            paths = [entry] if entry.is_file() else sorted(entry.glob("*")) if split else []
            files = [str(file) for file in paths if file.is_file() and kind_of(file.name) in kinds]
            if files:
                parts.setdefault(split, []).extend(files)
    return parts


def _file_rows(name: str, paths: list[str], flag: str, config: DataConfig) -> RawRows:
    """Files as one ``RawRows``, with the columns of the first ``_NUM_PEEKED`` rows. Raises
    ``UserError`` where one cannot be opened, there are no rows, or one of the first is unreadable.
    """

    def lines() -> Iterator[Line]:
        for path in paths:
            try:
                yield from read_lines(path, config.encoding)
            except OSError as error:
                why = error.strerror or str(error)
                raise UserError(f"{flag}: {path} cannot be read: {why}; check the file") from error

    skip_broken = config.on_bad_row == "skip"
    columns: dict[str, None] = {}
    first_fault = None
    for line in islice(lines(), _NUM_PEEKED):
        columns.update(dict.fromkeys(map(str, line.row or ())))
        if line.row is None and first_fault is None:
            first_fault = line
            if not skip_broken:
                break
    if first_fault and not (columns and skip_broken):
        raise broken_line(flag, first_fault.where, first_fault.fault, not skip_broken)
    if not columns:
        raise UserError(f"{flag}: {name} is empty; it needs at least one row")
    stats = [(stat.st_size, stat.st_mtime_ns) for stat in map(os.stat, paths)]
    stamp = repr([config.encoding, *map(os.path.abspath, paths), stats])
    return RawRows(name, list(columns), stamp, lines)


def _table_splits(
    name: str, splits: DatasetDict, flag: str, eval_splits: tuple[str, ...]
) -> Splits:
    """Picks the training split and the held-out split of a ``DatasetDict``."""
    names = list(splits)
    like_train = [s for s in names if s.startswith("train")] or (names if len(names) == 1 else [])
    train = next((s for s in ("train", "train_prefs", *like_train) if s in names), None)
    if train is None or not len(splits[train]):
        raise UserError(
            f"{flag}: {name} has no rows in a train split; its splits: {', '.join(names)}"
        )
    others = [splits[s] for s in eval_splits if s in names and s != train]
    held_out = (table_rows(name, table) for table in others if len(table))
    return Splits(table_rows(name, splits[train]), next(held_out, None))
