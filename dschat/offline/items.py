"""Reads what evaluation compares answers with: references and choices of every row."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dschat.config.errors import require
from dschat.data.sources.adapters import Content, listed, look_up
from dschat.offline.flags import EvalConfig
from dschat.offline.metrics import last_number
from dschat.offline.model import Model
from dschat.offline.rows import Dropped, Row, Rows, encoder
from dschat.rewards.call import REFERENCE
from dschat.rewards.library import as_text

_NEED_REFERENCE = ("exact_match", "numeric", "f1")
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass
class Item:
    """A row to evaluate on.

    ``answer``: the reference as text or an assistant's turn, for likelihoods and rewards.
    ``right``: the number of the right choice.
    """

    row: Row
    references: list[str] = field(default_factory=list)
    answer: Content | None = None
    choices: list[str] = field(default_factory=list)
    right: int = 0


def read_items(config: EvalConfig, rows: Rows, models: Sequence[Model]) -> list[Item]:
    """The rows that all tasks and models can use, in order. The others are dropped and counted.

    Raises:
        UserError: a column that a task needs is missing, or no row is left.
    """
    tasks = config.task or []
    column = _reference_column(config, rows)
    if "choice" in tasks:
        require(
            config.choices_column in rows.columns,
            f"--choices_column {config.choices_column} is not in the data; it has: "
            f"{listed(rows.columns)}",
        )
    encoders = [encoder(model.tokenizer, _longest_prompt(config, model)) for model in models]
    items: list[Item] = []

    def check(row: Row) -> str:
        item = Item(row)
        problem = _read(item, config, column)
        problem = problem or next(filter(None, (encode(row) for encode in encoders)), "")
        if not problem:
            items.append(item)
        return problem

    dropped = Dropped()
    kept = sum(1 for _ in rows.read(check, dropped))
    dropped.report(kept)
    return items[:kept]


def _longest_prompt(config: EvalConfig, model: Model) -> int:
    if config.text_column:
        return 2**62  # longer texts are cut into windows
    return model.longest_prompt(config.max_new_tokens if config.generates else 1)


def _reference_column(config: EvalConfig, rows: Rows) -> str | None:
    """The column of references; None: the answers that training would read, if there are any."""
    named, names = config.reference_column, (*REFERENCE, "chosen", "label")
    if named is not None:
        require(
            named.partition(".")[0] in rows.columns or named in rows.columns,
            f"--reference_column {named} is not in the data; it has: {listed(rows.columns)}",
        )
        return named
    found = next((name for name in names if name in rows.columns), None)
    needing = [task for task in config.task or () if task in (*_NEED_REFERENCE, "choice")]
    require(
        found is not None or not needing,
        f"--task {' '.join(needing)} needs reference answers; name their column with "
        f"--reference_column (the data has: {listed(rows.columns)})",
    )
    return found


def _read(item: Item, config: EvalConfig, column: str | None) -> str:
    """Fill in ``item``; returns why the tasks cannot use it, or ""."""
    tasks, row = config.task or [], item.row
    value = None if column is None else look_up(row.columns, column)
    if "choice" in tasks:
        problem = _read_choices(item, look_up(row.columns, config.choices_column), value)
        if problem:
            return problem
    values = value if isinstance(value, list) else [value]
    item.references = [as_text(v) for v in values if v is not None and not isinstance(v, dict)]
    item.answer = row.chosen
    if item.references and not (isinstance(row.chosen, list) and column == "chosen"):
        item.answer = item.references[0]
    if isinstance(row.prompt, list) and isinstance(item.answer, str):
        item.answer = [{"role": "assistant", "content": item.answer}]
    if not item.references and isinstance(item.answer, list):
        item.references = [item.answer[-1]["content"]]
    needs = any(task in _NEED_REFERENCE for task in tasks)
    needs |= "perplexity" in tasks and not config.text_column
    if needs and not item.references:
        return "no reference answer"
    if "numeric" in tasks and all(last_number(text) is None for text in item.references):
        return "a reference without a number"
    return ""


def _read_choices(item: Item, choices: Any, right: Any) -> str:
    """Choices, and the right one: by its number from 0, its letter or its text."""
    if isinstance(choices, str):  # a list in a CSV cell
        try:
            choices = json.loads(choices)
        except ValueError:
            choices = None
    if isinstance(choices, dict) and isinstance(choices.get("text"), list):  # as in ARC
        labels = choices.get("label")
        choices = choices["text"]
        if isinstance(labels, list) and right in labels:
            right = labels.index(right)
    if not isinstance(choices, list) or len(choices) < 2:
        return "fewer than two choices"
    item.choices = [as_text(choice) for choice in choices]
    if right in choices:
        item.right = choices.index(right)
        return ""
    text = as_text(right).strip()
    if text in item.choices:
        item.right = item.choices.index(text)
    elif text.isdecimal():
        item.right = int(text)
    else:
        item.right = _LETTERS.find(text.upper()) if len(text) == 1 else -1
    return "" if 0 <= item.right < len(choices) else "no right choice"
