"""Reads local files row by row: JSON, CSV, TSV, Parquet and text, plain or gzipped.

Every row is a ``Line`` with its place and the row, or its fault. Memory holds one row (of Parquet a
chunk, of a JSON list all) at a time.

Why not the readers of ``datasets``: these name the line of a fault and continue after it, keep
texts such as ``NA`` and ``007`` unchanged, and accept columns that mix numbers and texts.
"""

import csv
import gzip
import json
import re
import zlib
from collections.abc import Iterator
from io import TextIOWrapper
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, Optional, cast

from dschat.config.errors import first_line
from dschat.data.sources.turns import is_turn

JSON_SUFFIXES, TABLE_SUFFIXES, TEXT_SUFFIX = (".json", ".jsonl"), (".csv", ".tsv"), ".txt"
PARQUET_SUFFIX = ".parquet"
SUFFIXES = (*JSON_SUFFIXES, *TABLE_SUFFIXES, PARQUET_SUFFIX)
_CHUNK = 1 << 20  # characters of a first line
_BOM = "\ufeff"
_VISIBLE = re.compile(rf"[^\s{_BOM}]")
_MAX_LINE = 1 << 28  # characters of a line or a CSV field
_NOT_UTF8 = "not UTF-8 text; save the file as UTF-8, or name its encoding (--encoding)"


# How a row is stored: CSV has texts alone, tables of one schema ("arrow") fill in nulls.
Form = Literal["json", "csv", "arrow"]


class Line(NamedTuple):
    """A row of a source with its place, or, without a row, the fault at that place."""

    where: str
    row: Optional[dict[str, Any]]
    fault: str = ""
    form: Form = "json"


def kind_of(path: str) -> str:
    """The suffix of ``path`` without ``.gz``, in lower case: ".jsonl" for ``a.JSONL.gz``."""
    return Path(path.lower().removesuffix(".gz")).suffix


def read_lines(path: str, encoding: str = "utf-8") -> Iterator[Line]:
    """The rows of a file, one by one.

    A .txt file gives one row per paragraph (separated by blank lines), in the column ``text``.
    Raises ``OSError`` for a file that cannot be opened; a damaged file ends with a fault.
    """
    kind = kind_of(path)
    if kind == PARQUET_SUFFIX:
        yield from _parquet(path)
        return
    with gzip.open(path) if path.lower().endswith(".gz") else open(path, "rb") as raw:
        # NOTE: bytes that the encoding does not have become lone surrogates, see `_require_valid`.
        newline = None if kind == TEXT_SUFFIX else "\n"  # None: \r\n becomes \n
        file = TextIOWrapper(cast(IO[bytes], raw), encoding, "surrogateescape", newline=newline)
        try:
            if kind in TABLE_SUFFIXES:
                yield from _table(file, path, "\t" if kind == ".tsv" else None)
            elif kind == TEXT_SUFFIX:
                yield from _paragraphs(file, path)
            else:
                yield from _exported(_json(file, path))
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            yield Line(path, None, f"damaged gzip data ({error}); compress it again")
        except _TooLong as error:
            fault = f"longer than {_MAX_LINE >> 20} MiB; put each row on a line of its own"
            yield Line(f"{path}:{error}", None, fault)


class _TooLong(Exception):
    """A line, by its number."""


def _require_valid(text: str) -> str:
    """``text``; raises ``UnicodeEncodeError`` where bytes of it are not of the file's encoding."""
    text.encode()
    return text


def _numbered(file: TextIOWrapper) -> Iterator[tuple[int, Optional[str]]]:
    """Lines numbered from 1, without a byte order mark; None for one of another encoding."""
    for number, line in enumerate(iter(lambda: file.readline(_MAX_LINE + 1), ""), start=1):
        if len(line) > _MAX_LINE:
            raise _TooLong(number)
        try:
            yield number, _require_valid(line.removeprefix(_BOM) if number == 1 else line)
        except UnicodeEncodeError:
            yield number, None


# -- JSON


def _json(file: TextIOWrapper, name: str) -> Iterator[Line]:
    """One object per line, one list, or objects over several lines.

    The first non-blank line decides which, not the file's suffix.
    """
    starts = iter(lambda: file.readline(_CHUNK), "")  # a list of any length may be on one line
    first = next(filter(None, (start.strip(" \t\r\n" + _BOM) for start in starts)), "")
    file.seek(0)
    if first[:1] == "[" or first == "{":
        yield from _json_values(file, name, is_list=first[:1] == "[")
        return
    for number, line in _numbered(file):
        if line is None:
            yield Line(f"{name}:{number}", None, _NOT_UTF8)
        elif line.strip():
            yield _json_line(line.strip(), f"{name}:{number}")


def _exported(lines: Iterator[Line]) -> Iterator[Line]:
    """``lines``; or the items of ``data``, a list of objects, in a file of this one object."""
    head = list(islice(lines, 2))
    items = (head[0].row or {}).get("data") if len(head) == 1 else None
    if isinstance(items, list) and all(isinstance(i, dict) and not is_turn(i) for i in items):
        where = f"{head[0].where}, item "
        head = [Line(f"{where}{n} of data", item) for n, item in enumerate(items, start=1)]
    yield from chain(head, lines)


def _json_line(line: str, where: str) -> Line:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return Line(where, None, _broken_json(error))
    if not isinstance(row, dict):
        return Line(where, None, "not a JSON object; each line is one row")
    return Line(where, row)


def _broken_json(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "broken JSON (nested too deep); fix it"
    if isinstance(error, json.JSONDecodeError):
        return f"broken JSON ({error.msg}, column {error.colno}); fix it"
    return f"broken JSON ({str(error).split(';')[0]}); fix it"


def _json_values(file: TextIOWrapper, name: str, is_list: bool) -> Iterator[Line]:
    """The items of one list, or consecutive objects, of a file that memory holds as a whole.

    The text after a fault cannot be parsed: a fault ends the file.
    """
    try:
        text = _require_valid(file.read())
    except UnicodeEncodeError:
        file.seek(0)
        number = next((n for n, line in _numbered(file) if line is None), 1)
        yield Line(f"{name}:{number}", None, _NOT_UTF8)
        return
    decode, at, number, item = json.JSONDecoder().raw_decode, 0, 1, 0

    def next_is(marks: str) -> str:
        """The next visible character, which is consumed if it is one of ``marks``."""
        nonlocal at, number
        found = _VISIBLE.search(text, at)
        number += text.count("\n", at, found.start() if found else None)
        at = found.start() if found else len(text)
        at += bool(found and found[0] in marks)
        return found[0] if found else ""

    try:
        next_is("[" if is_list else "")
        while (char := next_is("")) and not (is_list and char == "]"):
            if is_list and item and next_is(",") != ",":
                raise json.JSONDecodeError("Expecting ','", text, at)
            next_is("")
            value, end = decode(text, at)
            item += 1
            if isinstance(value, dict):
                yield Line(f"{name}:{number}", value)
            else:
                yield Line(f"{name}: item {item} of its list", None, "not a JSON object")
            number, at = number + text.count("\n", at, end), end
        if is_list and not char:
            raise json.JSONDecodeError("Expecting ']'", text, at)
    except json.JSONDecodeError as error:
        yield Line(f"{name}:{error.lineno}", None, _broken_json(error))
    except (ValueError, RecursionError) as error:
        yield Line(f"{name}:{number}", None, _broken_json(error))


# -- CSV and TSV


def _table(file: TextIOWrapper, name: str, delimiter: Optional[str]) -> Iterator[Line]:
    """Rows with the first line's column names; it also shows the delimiter if none is given."""
    csv.field_size_limit(_MAX_LINE)
    not_utf8: list[int] = []

    def lines() -> Iterator[str]:
        for number, line in _numbered(file):
            if line is None:
                not_utf8.append(number)
            yield line or "\n"

    source = lines()
    numbered = ((number, line) for number, line in enumerate(source, start=1) if line.strip())
    first, header = next(numbered, (0, ""))
    delimiter = delimiter or next((mark for mark in ",;\t|" if mark in header), ",")
    try:
        names = next(csv.reader([header], delimiter=delimiter, strict=True), [])
    except csv.Error as error:
        yield Line(f"{name}:{first}", None, f"broken CSV ({error}); fix the line of column names")
        return
    names = [column.strip() for column in names]
    if not_utf8:
        yield Line(f"{name}:{not_utf8[0]}", None, _NOT_UTF8)
        return
    if not all(names) or len(set(names)) < len(names):
        fault = "its first line must name every column, each once"
        yield Line(f"{name}:{first}", None, fault)
        return
    rows = csv.reader(source, delimiter=delimiter, strict=True)
    while True:
        start = first + rows.line_num + 1
        try:
            fields = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            yield Line(f"{name}:{start}", None, f"broken CSV ({error}); fix its quotation marks")
            continue
        if not_utf8 and not_utf8[-1] >= start:
            yield Line(f"{name}:{not_utf8[-1]}", None, _NOT_UTF8)
        elif len(fields) == len(names):
            yield Line(f"{name}:{start}", dict(zip(names, fields, strict=True)), form="csv")
        elif any(field.strip() for field in fields):
            fault = f"{len(fields)} fields where the first line names {len(names)} columns"
            yield Line(f"{name}:{start}", None, fault)


# -- text and Parquet


def _paragraphs(file: TextIOWrapper, name: str) -> Iterator[Line]:
    start, paragraph = 1, list[str]()
    for number, line in chain(_numbered(file), [(0, "")]):  # a blank line ends the last one too
        if line is None:
            yield Line(f"{name}:{number}", None, _NOT_UTF8)
        elif line.strip():
            start = start if paragraph else number
            paragraph.append(line)
        elif paragraph:
            yield Line(f"{name}:{start}", {"text": "".join(paragraph).rstrip("\n")})
            paragraph.clear()


def _parquet(path: str) -> Iterator[Line]:
    import pyarrow
    from pyarrow import parquet

    row = 0
    with open(path, "rb") as file:
        try:
            for batch in parquet.ParquetFile(file).iter_batches(batch_size=256):
                for values in batch.to_pylist():
                    row += 1
                    yield Line(f"{path}, row {row}", values, form="arrow")
        except (pyarrow.ArrowException, ValueError, OSError) as error:
            fault = f"damaged Parquet data ({first_line(error)}); write it again"
            yield Line(f"{path}, row {row + 1}", None, fault)
