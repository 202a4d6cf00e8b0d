"""Tables of rows on disk: cached by content and code, read in batches, and reported in the log.

``datasets.map`` caches too, but its keys cover the function that it maps, not the functions that
this one calls, so a table would outlive a bug fix there. Here every key includes a digest of the
code: another version reads and tokenizes the data again.
"""

import glob
import hashlib
import io
import json
import logging
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.compute as pc
from datasets import Dataset, Features
from datasets.arrow_writer import ArrowWriter
from datasets.fingerprint import Hasher
from pandas import DataFrame

from dschat.config import UserError
from dschat.config.errors import require
from dschat.data.sources.readers import SUFFIXES, TEXT_SUFFIX, kind_of
from dschat.startup.files import discard, replace_file, sha256_of, sync_file

logger = logging.getLogger("dschat")

CODE = Path(__file__).parents[2]  # the package
# reads, normalizes, renders, tokenizes
_MADE_BY = ("data/**/*.py", "models/c*_te*.py", "models/tokenizer.py")
_LIBRARIES = ("transformers", "tokenizers")  # called by these modules


@contextmanager
def quiet() -> Iterator[None]:
    """Turns off the progress bars and the logging of ``datasets``."""
    bars, verbosity = datasets.are_progress_bars_disabled(), datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(verbosity)
        if not bars:
            datasets.enable_progress_bars()


def made_table(features: Features, rows: Iterable[dict[str, Any]], content: str = "") -> Dataset:
    """A table of ``rows``: read from the cache, or written there first, atomically.

    ``content``: a text that identifies the rows; without it the table is in memory.
    """
    if not content:
        return Dataset.from_dict(_columns(features, list(rows)), features)
    key = hashlib.blake2b(f"{code_digest()} {content}".encode(), digest_size=16).hexdigest()
    with _cache() as folder:
        path = _whole(folder, key)
        if path is None:
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                made = Path(scratch, "rows.arrow")
                _write(str(made), features, iter(rows))
                sync_file(made)
                path = folder / f"{key}-{sha256_of(made)}.arrow"
                os.replace(made, path)
                sync_file(folder)
        with quiet():
            return Dataset.from_file(str(path))


def data_names(data: Any, argument: str) -> list[str]:
    """What ``--data_path`` takes for an ``argument`` of Python code: names stay; dicts, a `Dataset`
    or a DataFrame of pandas become a file of the cache, named by its content.

    Raises:
        UserError: it is something else, or empty.
    """
    if isinstance(data, (str, os.PathLike)):
        name = str(data)
        problem = f"{argument} {name[:60]!r} is no file or data set; texts are rows, as"
        require(not _is_text(name), f'{problem} [{{"prompt": ...}}]')
        return [name]
    if isinstance(data, DataFrame):
        data = data.astype(object).where(data.notna(), None).to_dict("records")
    is_list = isinstance(data, (list, tuple))
    if is_list and not all(map(_is_row, data)):
        return [name for item in data for name in data_names(item, argument)]
    if not (is_list or isinstance(data, Dataset)):
        raise UserError(
            f"{argument} of type {type(data).__name__}: give a list of dicts, a Dataset (one split "
            "of a DatasetDict), a DataFrame, or names"
        )
    require(len(data) > 0, f"{argument} is empty; it needs at least one row")
    if is_list:
        # NumPy's and torch's values become Python's; dates and others text, as in an `Example`
        plain = partial(json.dumps, default=lambda v: getattr(v, "tolist", v.__str__)())
        try:
            content = "".join(f"{plain(row)}\n" for row in data).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise UserError(f"{argument} has a row that JSON cannot hold: {error}") from None
    else:
        with quiet():
            data.to_parquet(file := io.BytesIO())
        content = file.getvalue()
    name = f"{hashlib.sha256(content).hexdigest()[:16]}-rows{'.jsonl' if is_list else '.parquet'}"
    with _cache() as folder:
        replace_file(folder / name, content, 0.0)  # NOTE: tables made of it are found by its time
        return [str(folder / name)]


def _is_text(name: str) -> bool:
    """Whether it has spaces, and is neither of a file, with its weight or without, nor like one."""
    path = os.path.expanduser(re.sub(r":[\d.]+$", "", name))
    is_like_one = kind_of(path) in (*SUFFIXES, TEXT_SUFFIX) or os.path.lexists(path)
    return bool(re.search(r"\s", name)) and not (is_like_one or glob.glob(path))


def _is_row(row: Any) -> bool:
    tables = Dataset, datasets.IterableDataset  # splits, a DatasetDict or not
    return isinstance(row, dict) and not any(isinstance(v, tables) for v in row.values())


@contextmanager
def _cache() -> Iterator[Path]:
    """The folder of tables, made where it is missing; ``UserError`` where it cannot be used."""
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "dschat"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
    except OSError as error:
        raise UserError(
            f"the data cache {folder} cannot be used ({error.strerror or error}); set "
            "HF_DATASETS_CACHE to a folder with room"
        ) from error


def _whole(folder: Path, key: str) -> Path | None:
    """The table of ``key`` whose content has the checksum in its name; a damaged one is removed."""
    for path in folder.glob(f"{key}-*"):
        if path.is_file() and path.name == f"{key}-{sha256_of(path)}.arrow":
            return path
        logger.warning("%s is damaged: the rows are read again", path)
        discard(path)
    return None


def derived_content(table: Dataset, *how: Any) -> str:
    """The ``content`` of a table made from ``table`` by ``how``; "" where that is in memory."""
    return f"{table._fingerprint} {Hasher.hash(how)}" if table.cache_files else ""


def code_digest() -> str:
    """A digest of the code that makes tables."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(path for pattern in _MADE_BY for path in CODE.glob(pattern)):
        digest.update(path.read_bytes())
    for library in _LIBRARIES:
        digest.update(version(library).encode())
    return digest.hexdigest()


def _write(path: str, features: Features, rows: Iterator[dict[str, Any]]) -> None:
    with ArrowWriter(features=features, path=path) as writer:
        while batch := list(islice(rows, 1000)):
            columns = _columns(features, batch)
            writer.write_table(pyarrow.table(columns, schema=features.arrow_schema))
        writer.finalize()


def _columns(features: Features, rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in features}


def iterate(rows: Dataset, columns: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """The rows' values in ``columns``, decoded one batch at a time to bound memory."""
    table = rows.select_columns(list(columns)).with_format("arrow")
    for batch in table.iter(1000) if len(rows) else ():
        yield from batch.to_pylist()


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
