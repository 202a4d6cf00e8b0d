"""Read one table from disk or from the hub, or say in one line why it cannot be read.

Comes in: a local .json, .jsonl or .txt path, or a hub name. Goes out: a ``datasets.Dataset`` of raw
rows, read and cached by the ``datasets`` library (HF_DATASETS_CACHE is its own affair). Must not
know what the columns mean.
"""

import glob
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Optional

import datasets
from datasets import Dataset, DatasetDict

from dschat.config import UserError

JSON_SUFFIXES = (".json", ".jsonl")
EVAL_SPLITS = ("test", "validation", "eval", "valid", "dev")


@contextmanager
def quiet() -> Iterator[None]:
    """Without the library's progress bars and error lines: ours name the line and the remedy."""
    bars, verbosity = datasets.are_progress_bars_disabled(), datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(verbosity)
        if not bars:
            datasets.enable_progress_bars()


def looks_like_file(name: str) -> bool:
    """Whether ``name`` means a local file: it is one, or nothing on the hub could be called so."""
    path = os.path.expanduser(name)
    return (
        os.path.isfile(path)
        or name.lower().endswith((*JSON_SUFFIXES, ".txt"))
        or name.startswith(("/", "./", "../", "~"))
        and not os.path.isdir(path)
    )


def read_file(name: str, flag: str, allow_text: bool = False) -> Dataset:
    """The rows of a .jsonl or .json file (a list, or an object a line); ``allow_text``: or a .txt.

    A .txt file becomes one row per paragraph (blank lines part them), in the column ``text``.

    Raises:
        UserError: no such file, wrong kind, empty, not UTF-8, broken JSON (naming the line).
    """
    path = os.path.abspath(os.path.expanduser(name))
    suffix = os.path.splitext(path)[1].lower()
    kinds = (*JSON_SUFFIXES, ".txt") if allow_text else JSON_SUFFIXES
    if not os.path.isfile(path):
        raise UserError(f"{flag}: no such data file: {name}; check the path")
    if suffix not in kinds:
        raise UserError(f"{flag}: {name} is not one of {', '.join(kinds)}; convert it")
    try:
        blank = _is_blank(path)
    except UnicodeDecodeError as error:
        raise UserError(f"{flag}: {_find_fault(path, suffix)}") from error
    if blank:
        raise UserError(f"{flag}: {name} is empty; it needs at least one row")
    loader = ("text", {"sample_by": "paragraph"}) if suffix == ".txt" else ("json", {})
    try:
        with quiet():
            # NOTE: data_files is a glob pattern, so a real name such as data[1].jsonl is escaped.
            table = datasets.load_dataset(
                loader[0], data_files=glob.escape(path), split="train", **loader[1]
            )
    except Exception as error:  # the library wraps its parsers' many errors: find the true one
        fault = _find_fault(path, suffix) or f"{name} cannot be read: {_first_line(error)}"
        raise UserError(f"{flag}: {fault}") from error
    if not len(table):
        raise UserError(f"{flag}: {name} is empty; it needs at least one row")
    return table


def read_hub(name: str, flag: str, config_name: Optional[str] = None) -> DatasetDict:
    """All splits of a hub data set (or of a local folder that ``datasets`` understands).

    Raises:
        UserError: it cannot be found or reached, or it has no ``train`` split.
    """
    try:
        with quiet():
            splits = datasets.load_dataset(name, config_name)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise UserError(
            f"{flag}: {name} is neither a data file here nor a data set the hub gives us "
            f"({_first_line(error)}); check the name"
        ) from error
    if not len(splits.get("train", ())):
        raise UserError(
            f"{flag}: {name} has no rows in a train split; its splits: {', '.join(splits)}"
        )
    return splits


def eval_split(splits: DatasetDict) -> Optional[Dataset]:
    """The held-out split of a hub data set, under whichever of the usual names it goes."""
    return next((splits[name] for name in EVAL_SPLITS if len(splits.get(name, ()))), None)


def line_of(name: str, row: int) -> str:
    """Where row ``row`` (from 0) of a source stands, as a person looks for it: FILE:LINE."""
    if name.lower().endswith(".jsonl"):
        with open(os.path.expanduser(name), encoding="utf-8") as file:
            filled = (number for number, line in enumerate(file, start=1) if line.strip())
            for position, number in enumerate(filled):
                if position == row:
                    return f"{name}:{number}"
    return f"{name}, row {row + 1}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def _is_blank(path: str) -> bool:
    """Whether a file holds nothing but white space.

    It reads to the end, since the loader passes on bytes that are not UTF-8, to fail far from here.
    """
    blank = True
    with open(path, encoding="utf-8-sig") as file:
        for chunk in iter(lambda: file.read(1 << 20), ""):
            blank = blank and chunk.isspace()
    return blank


def _find_fault(path: str, suffix: str) -> Optional[str]:
    """What is wrong with a file that the loader refused, "FILE:LINE: ..."; None if nothing is."""
    if suffix == ".json":
        whole = _json_list_fault(path)
        if whole is not None:
            return whole or None
    with open(path, "rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                line = raw.decode("utf-8-sig")
                if suffix != ".txt" and line.strip() and not isinstance(json.loads(line), dict):
                    return f'{path}:{number}: not a JSON object such as {{"prompt": ...}}'
            except UnicodeDecodeError:
                return f"{path}:{number}: not UTF-8 text; save the file as UTF-8"
            except json.JSONDecodeError as error:
                return f"{path}:{number}: broken JSON ({error.msg}, column {error.colno}); mend it"
    return None


def _json_list_fault(path: str) -> Optional[str]:
    """The fault of a .json file that is one list: "" for none, None where it is not a list."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read()
        if not text.lstrip().startswith("["):
            return None
        rows = json.loads(text)
    except UnicodeDecodeError:
        return None  # the walk over its lines finds where
    except json.JSONDecodeError as error:
        return f"{path}:{error.lineno}: broken JSON ({error.msg}, column {error.colno}); mend it"
    if not rows:
        return f"{path} is empty; it needs at least one row"
    odd = next((i for i, row in enumerate(rows) if not isinstance(row, dict)), None)
    return "" if odd is None else f"{path}: item {odd + 1} of its list is not a JSON object"
