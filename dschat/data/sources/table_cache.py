"""Caches tables in the cache of ``datasets``, keyed by content and code.

The library's own keys cover the function that it maps but not the functions that this one calls, so
a table would outlive a bug fix there. Here every key includes a digest of the code: another version
reads and tokenizes the data again.
"""

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pyarrow
from datasets import Dataset, Features
from datasets.arrow_writer import ArrowWriter

from dschat.config import UserError
from dschat.data.sources.resolve import quiet

CODE = Path(__file__).parents[2]  # the package
# reads, normalizes, renders, tokenizes
_MADE_BY = ("data/**/*.py", "models/chat_template.py", "models/c*_text.py", "models/tokenizer.py")
_LIBRARIES = ("transformers", "tokenizers")  # called by these modules


def cached_table(
    content: str, features: Features, rows: Callable[[], Iterator[dict[str, Any]]]
) -> Dataset:
    """A table of ``rows()``, read from the cache, or written there first.

    ``content``: a text that identifies the rows. The file is written atomically.
    """
    folder = Path(datasets.config.HF_DATASETS_CACHE) / "dschat"
    key = hashlib.blake2b(f"{code_digest()} {content}".encode(), digest_size=16).hexdigest()
    path = folder / f"{key}.arrow"
    try:
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                _write(f"{scratch}/rows.arrow", features, rows())
                os.replace(f"{scratch}/rows.arrow", path)
        with quiet():
            return Dataset.from_file(str(path))
    except OSError as error:
        raise UserError(
            f"the data cache {folder} cannot be used ({error.strerror or error}); set "
            "HF_DATASETS_CACHE to a folder with room"
        ) from error


def mapped(table: Dataset, function: Callable[..., dict[str, Any]], **options: Any) -> Dataset:
    """``table.map(function, **options)``, cached until the code changes."""
    with quiet():
        return table.map(_call, fn_kwargs={"function": function, "code": code_digest()}, **options)


def code_digest() -> str:
    """A digest of the code that makes tables."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(path for pattern in _MADE_BY for path in CODE.glob(pattern)):
        digest.update(path.read_bytes())
    for library in _LIBRARIES:
        digest.update(version(library).encode())
    return digest.hexdigest()


def _call(*batch: Any, function: Callable[..., dict[str, Any]], code: str) -> dict[str, Any]:
    return function(*batch)


def _write(path: str, features: Features, rows: Iterator[dict[str, Any]]) -> None:
    with ArrowWriter(features=features, path=path) as writer:
        while batch := list(islice(rows, 1000)):
            columns = {name: [row[name] for row in batch] for name in features}
            writer.write_table(pyarrow.table(columns, schema=features.arrow_schema))
        writer.finalize()
