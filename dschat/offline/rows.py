"""Reads the rows of data sets one by one, with their prompts tokenized as in training."""

import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from transformers import PreTrainedTokenizerBase

from dschat.config import UserError
from dschat.config.errors import require
from dschat.data.rendering import RefusedChat
from dschat.data.segments import prompt_text_ids
from dschat.data.sources.adapters import Content, Example, normalize
from dschat.data.sources.splits import BROKEN, check_allowed, open_source
from dschat.data.tokenize import question_text
from dschat.observability import console
from dschat.offline.flags import PromptsConfig

logger = logging.getLogger("dschat")

FLAG = "--data_path"


@dataclass
class Row:
    """A row of the data: its columns as they were read, and its prompt."""

    where: str
    columns: dict[str, Any]
    prompt: Content
    inputs: dict[str, Any] = field(default_factory=dict)  # what the template gets beside it
    ids: list[int] = field(default_factory=list)  # of the prompt, once tokenized

    @property
    def question(self) -> str:
        """What reward functions get as the prompt: its text, or the last user turn."""
        return question_text(self.prompt)


class Rows:
    """The rows of ``--data_path``, in order. Every iteration reads the files again.

    Attributes:
        columns: names in any source.
        prompt_columns: those that hold prompts.

    Raises:
        UserError: a source that cannot be read, or that has no prompts.
    """

    def __init__(self, config: PromptsConfig) -> None:
        self.config = config
        self._sources = [open_source(path, config.data, FLAG) for path in config.data_path or ()]
        for source in self._sources:
            require(
                source.weight == 1,
                f"{FLAG} {source.name}:{source.weight:g}: weights are for training, and every row "
                "is read once here; leave it out",
            )
        self.columns = [*dict.fromkeys(c for s in self._sources for c in s.splits.train.columns)]
        self.prompt_columns = {s.adapter.prompt for s in self._sources if s.adapter.prompt}

    def __iter__(self) -> Iterator[tuple[Row, str]]:
        """Every row, with why it has no prompt ("" if it has one)."""
        for source in self._sources:
            held_out = source.splits.eval if self.config.split == "eval" else None
            for line in held_out or source.splits.train:
                parts = {"problem": BROKEN}
                if line.row is not None:
                    parts = normalize(line.row, source.adapter, "rlhf", line.form)
                if parts["problem"]:
                    bad = {"where": line.where, "fault": line.fault, "problem": parts["problem"]}
                    check_allowed(bad, self.config.on_bad_row, FLAG)
                example = Example("") if parts["problem"] else Example.from_row(parts)
                row = Row(line.where, line.row or {}, example.prompt, example.inputs)
                yield row, parts["problem"]


class Prompts:
    """The rows with a prompt of at most ``max_len`` tokens, tokenized. Reads all of them once.

    Attributes:
        total: number of rows.
        longest: tokens of the longest prompt.

    Raises:
        UserError: a row that ``--on_bad_row`` does not allow, or no usable rows.
    """

    def __init__(self, rows: Rows, tokenizer: PreTrainedTokenizerBase, max_len: int) -> None:
        self._rows, self._tokenizer, self._max_len = rows, tokenizer, max_len
        self._dropped: Counter[str] = Counter()
        lengths = [len(row.ids) for row in self]
        self.total, self.longest = len(lengths), max(lengths, default=0)
        # A chat that the tokenizer's template refuses has a prompt.
        is_refused = any("template" in problem for problem in self._dropped)
        why = ", ".join(f"{count} with {problem}" for problem, count in self._dropped.items())
        hint = "" if is_refused else "; see --columns prompt=COLUMN"
        require(self.total > 0, f"{FLAG}: no usable rows ({why or 'it is empty'}){hint}")
        if why:
            count = self._dropped.total()
            logger.warning("dropped %d of %d rows: %s", count, count + self.total, why)

    def __iter__(self) -> Iterator[Row]:
        self._dropped.clear()
        return islice(self._usable(), self._rows.config.max_rows)

    def _usable(self) -> Iterator[Row]:
        for row, problem in self._rows:
            if problem := problem or self._encode(row):
                self._dropped[problem] += 1
            else:
                yield row

    def _encode(self, row: Row) -> str:
        """Fill in the row's ids; returns why it cannot be used, or ""."""
        try:
            row.ids = prompt_text_ids(self._tokenizer, row.prompt, **row.inputs)
        except RefusedChat as error:
            return str(error)
        except UserError as error:
            raise UserError(f"{FLAG}: {row.where}: {error}") from None
        if not row.ids:
            return "a prompt without tokens"
        too_long = len(row.ids) > self._max_len
        return f"a prompt of more than {self._max_len} tokens" if too_long else ""


# -- progress --------------------------------------------------------------------------------------

_INTERVAL_S = 30.0  # between two log lines


class Progress:
    """Shows progress: a bar on a terminal, else a log line every half minute.

    Args:
        total, done: prompts, over all starts of the command.
    """

    def __init__(self, total: int, done: int, description: str) -> None:
        self._total, self._done, self._first = total, done, done
        self._description, self._tokens = description, 0
        self._started = self._logged = time.monotonic()
        self._bar = console.progress(total, description, done=done)

    def advance(self, prompts: int, tokens: int) -> None:
        """Add answered prompts, with the tokens of their answers."""
        self._done += prompts
        self._tokens += tokens
        rate = self._tokens / self._elapsed_s
        self._bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
        self._bar.update(prompts)
        now = time.monotonic()
        if not sys.stderr.isatty() and now - self._logged >= _INTERVAL_S:
            self._logged = now
            logger.info("%s", self.line())

    def line(self) -> str:
        """``answers: 512 of 3,000 prompts, 1,234 tokens/s, 75 s left``"""
        new, elapsed_s = self._done - self._first, self._elapsed_s
        left_s = (self._total - self._done) * elapsed_s / max(new, 1)
        left = f", {left_s:.0f} s left" if self._done < self._total else ""
        return (
            f"{self._description}: {self._done:,} of {self._total:,} prompts, "
            f"{self._tokens / elapsed_s:,.0f} tokens/s{left}"
        )

    def close(self) -> None:
        self._bar.close()

    @property
    def _elapsed_s(self) -> float:
        return max(time.monotonic() - self._started, 1e-9)
