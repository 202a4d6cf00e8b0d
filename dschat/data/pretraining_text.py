"""Packs plain text into blocks of equal length for the pretraining loss of step 3 (ptx)."""

import logging
from collections.abc import Iterator
from itertools import islice
from typing import Optional

from datasets import Dataset, Features, List, Value
from datasets.fingerprint import Hasher
from transformers import PreTrainedTokenizerBase

from dschat.config import UserError
from dschat.config.data import DataConfig
from dschat.data.segments import require_eos
from dschat.data.sources.resolve import RawRows, broken_line, read_source
from dschat.data.sources.tables import made_table, read_report
from dschat.data.sources.turns import storable
from dschat.models.tokenizer import text_ids

logger = logging.getLogger("dschat")

_FLAG = "--unsupervised_dataset_name"
_DOCUMENTS = 1000  # joined at a time


def text_dataset(
    name: str,
    column: str,
    tokenizer: PreTrainedTokenizerBase,
    block_len: int,
    config: Optional[DataConfig] = None,
) -> Dataset:
    """Plain text for ptx: ``input_ids`` of ``block_len`` tokens, documents joined by EOS,
    behind the BOS that the tokenizer adds.

    ``name`` is a source as in ``--data_path``, or a .txt file (each paragraph is a document).
    Documents are joined a thousand at a time; a last block that is not full is kept only if it is
    the only one of its thousand. ``config`` decides about unreadable lines.

    Raises:
        UserError: unreadable data, no column ``column``, or no text in it.
    """
    config = config or DataConfig()
    skip = config.on_bad_row == "skip"
    rows = read_source(name, _FLAG, config, allow_text=True).train
    if column not in rows.columns:
        raise UserError(
            f"--unsup_column {column!r} is not in {name}; it has: {', '.join(rows.columns)}"
        )
    how = Hasher.hash([tokenizer, block_len])
    content = repr(["text", rows.stamp, rows.name, column, skip, how]) if rows.stamp else ""
    table = made_table(
        Features({"input_ids": List(Value("int32"))}),
        _blocks(_texts(rows, column, skip), tokenizer, block_len),
        content,
    )
    if not len(table):
        raise UserError(f"{_FLAG}: {name} has no text in its column {column!r}")
    logger.info("%s", read_report(f"text of {name}", table, "input_ids")[0])
    return table


def _texts(rows: RawRows, column: str, skip: bool) -> Iterator[str]:
    """The non-blank documents in a column."""
    for line in rows:
        if line.row is None and not skip:
            raise broken_line(_FLAG, line.where, line.fault)
        text = (line.row or {}).get(column)
        if isinstance(text, str) and text.strip():
            yield storable(text)


def _blocks(
    texts: Iterator[str], tokenizer: PreTrainedTokenizerBase, block_len: int
) -> Iterator[dict[str, list[int]]]:
    """The rows."""
    eos = require_eos(tokenizer)
    while batch := list(islice(texts, _DOCUMENTS)):
        stream = [token for ids in text_ids(tokenizer, batch) for token in (*ids, eos)]
        whole = len(stream) // block_len * block_len or len(stream)
        for start in range(0, whole, block_len):
            yield {"input_ids": stream[start : start + block_len]}
