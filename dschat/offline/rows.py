"""Reads the rows of data sets one by one, with their prompts tokenized as in training."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from transformers import PreTrainedTokenizerBase

from dschat.config import UserError
from dschat.config.errors import require
from dschat.data.segments import RefusedChat, prompt_text_ids
from dschat.data.sources.adapters import Content, Example, normalize
from dschat.data.sources.normalize import BROKEN, check_allowed
from dschat.data.sources.splits import DataSource, open_source
from dschat.data.tokenize import question_text
from dschat.offline.flags import PromptsConfig

logger = logging.getLogger("dschat")

FLAG = "--data_path"


@dataclass
class Row:
    """A row of the data: its columns as they were read, its prompt, its answer if it has one."""

    where: str
    columns: dict[str, Any]
    prompt: Content
    chosen: Content | None = None
    ids: list[int] = field(default_factory=list)  # of the prompt, once tokenized

    @property
    def question(self) -> str:
        """What reward functions get as the prompt: its text, or the last user turn."""
        return question_text(self.prompt)


class Dropped(Counter[str]):
    """Counts the rows that cannot be used, by reason."""

    def report(self, kept: int) -> None:
        """Warn of the dropped rows.

        Raises:
            UserError: no row is left.
        """
        if not self and kept:
            return
        why = ", ".join(f"{count} with {problem}" for problem, count in self.items())
        # A chat that the tokenizer's template refuses has a prompt.
        hint = "" if any("template" in problem for problem in self) else "; see --prompt_column"
        require(kept > 0, f"{FLAG}: no usable rows ({why or 'it is empty'}){hint}")
        logger.warning("dropped %d of %d rows: %s", self.total(), kept + self.total(), why)


class Rows:
    """The usable rows of ``--data_path``, in order. Every iteration reads the files again.

    Attributes:
        columns: names in any source.
        prompt_columns: those that hold prompts.

    Raises:
        UserError: a source that cannot be read, or that has no prompts.
    """

    def __init__(self, config: PromptsConfig) -> None:
        self._split, self._policy, self._max_rows = config.split, config.on_bad_row, config.max_rows
        self._sources = [open_source(path, config.data, FLAG) for path in config.data_path or ()]
        for source in self._sources:
            require(
                source.weight == 1,
                f"{FLAG} {source.name}:{source.weight:g}: weights are for training, and every row "
                "is read once here; leave it out",
            )
        self.columns = [*dict.fromkeys(c for s in self._sources for c in s.splits.train.columns)]
        self.prompt_columns = {s.adapter.prompt for s in self._sources if s.adapter.prompt}

    def read(self, check: Callable[[Row], str], dropped: Dropped) -> Iterator[Row]:
        """Yields the rows for which ``check`` finds no problem; counts the others."""
        rows = (row for source in self._sources for row in self._usable(source, check, dropped))
        return islice(rows, self._max_rows)

    def _usable(
        self, source: DataSource, check: Callable[[Row], str], dropped: Dropped
    ) -> Iterator[Row]:
        held_out = source.splits.eval if self._split == "eval" else None
        for line in held_out or source.splits.train:
            if line.row is None:
                problem = BROKEN
            else:
                parts = normalize(line.row, source.adapter, "rlhf", line.form)
                problem = parts["problem"]
            if problem:
                bad = {"where": line.where, "fault": line.fault, "problem": problem}
                check_allowed(bad, self._policy, FLAG)
            else:
                example = Example.from_row(parts)
                row = Row(line.where, line.row or {}, example.prompt, example.chosen)
                problem = check(row)
            if problem:
                dropped[problem] += 1
            else:
                yield row


class Prompts:
    """The rows with a prompt of at most ``max_len`` tokens, tokenized. Reads all of them once.

    Attributes:
        total: number of rows.
        longest: tokens of the longest prompt.

    Raises:
        UserError: a row that ``--on_bad_row`` does not allow, or no usable rows.
    """

    def __init__(self, rows: Rows, tokenizer: PreTrainedTokenizerBase, max_len: int) -> None:
        self.rows = rows
        self._encode = encoder(tokenizer, max_len)
        dropped = Dropped()
        self.total = self.longest = 0
        for row in rows.read(self._encode, dropped):
            self.total += 1
            self.longest = max(self.longest, len(row.ids))
        dropped.report(self.total)

    def __iter__(self) -> Iterator[Row]:
        return self.rows.read(self._encode, Dropped())


def encoder(tokenizer: PreTrainedTokenizerBase, max_len: int) -> Callable[[Row], str]:
    """A function that fills in a row's ids; it returns why the row cannot be used, or ""."""

    def encode(row: Row) -> str:
        try:
            row.ids = prompt_text_ids(tokenizer, row.prompt)
        except RefusedChat as error:
            return str(error)
        except UserError as error:
            raise UserError(f"{FLAG}: {row.where}: {error}") from None
        if not row.ids:
            return "a prompt without tokens"
        return f"a prompt of more than {max_len} tokens" if len(row.ids) > max_len else ""

    return encode
