"""Reads the rows of data sets one by one, with their prompts tokenized as in training; and appends
their answers to a file of JSON lines that a killed command continues.

Lines go to ``OUT.partial``, which becomes ``OUT`` when the last one is written, so ``OUT`` is
complete or absent. ``OUT.settings.json`` holds the settings that the lines depend on: another
command, or the same one with other settings, is refused.
"""

import fcntl
import json
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from dschat.config import UserError
from dschat.config.errors import require
from dschat.data.rendering import RefusedChat
from dschat.data.segments import prompt_text_ids
from dschat.data.sources.adapters import Content, Example, normalize
from dschat.data.sources.splits import BROKEN, check_allowed, open_source
from dschat.data.sources.turns import is_plain
from dschat.inference.protocol import Rollout
from dschat.models.continued_text import whole_texts
from dschat.observability import console
from dschat.offline.flags import GenerateConfig, PromptsConfig
from dschat.startup.files import no_link, replace_file, sync_file

logger = logging.getLogger("dschat")

FLAG = "--data_path"

# By name: the values of rows (R,), NaN where a row has none.
Metrics = dict[str, np.ndarray]


@dataclass
class Row:
    """A row of the data: its columns as they were read, and its prompt."""

    where: str
    columns: dict[str, Any]
    prompt: Content
    inputs: dict[str, Any] = field(default_factory=dict)  # what the template gets beside it
    ids: list[int] = field(default_factory=list)  # of the prompt, once tokenized


class Rows:
    """The rows of ``--data_path``, in order. Every iteration reads the files again.

    Attributes:
        columns: names in any source.
        prompt_columns: names of the columns that hold prompts.

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
        num_plain: rows whose prompt is text without a chat's marks.

    Raises:
        UserError: a row that ``--on_bad_row`` does not allow, or no usable rows.
    """

    def __init__(self, rows: Rows, tokenizer: PreTrainedTokenizerBase, max_len: int) -> None:
        self._rows, self._tokenizer, self._max_len = rows, tokenizer, max_len
        self._dropped: Counter[str] = Counter()
        self.total = self.longest = self.num_plain = 0
        for row in self:
            self.total += 1
            self.longest = max(self.longest, len(row.ids))
            self.num_plain += is_plain(row.prompt)
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

    def __init__(self, total: int, done: int) -> None:
        self._tokens, self._logged = 0, time.monotonic()
        self._bar = console.progress(total, "generate", done=done)

    def advance(self, prompts: int, tokens: int) -> None:
        """Add answered prompts, with the tokens of their answers."""
        self._tokens += tokens
        self._bar.set_postfix_str(self._rate, refresh=False)
        self._bar.update(prompts)
        now = time.monotonic()
        if not sys.stderr.isatty() and now - self._logged >= _INTERVAL_S:
            self._logged = now
            logger.info("%s%s", self.line(), console.eta(self._bar))

    def line(self) -> str:
        """``generate: 512 of 3,000 prompts, 1,234 tokens/s``"""
        bar = self._bar
        return f"generate: {bar.n:,} of {bar.total:,} prompts, {self._rate}"

    @property
    def _rate(self) -> str:
        return f"{self._tokens / max(self._bar.format_dict['elapsed'], 1e-9):,.0f} tokens/s"

    def close(self) -> None:
        self._bar.close()


OUT = "--out"


class AnswerFile:
    """The output of one command.

    Args:
        settings: JSON values by flag.
        overwrite: remove what is there.

    Attributes:
        num_lines: complete lines of an earlier start.
        is_complete: an earlier start has finished.

    Raises:
        UserError: the file cannot be written, or another command wrote or is writing it.
    """

    def __init__(self, path: str, settings: dict[str, Any], overwrite: bool = False) -> None:
        self._path = Path(os.path.expanduser(path))
        self._partial = self._path.with_name(f"{self._path.name}.partial")
        self._settings = self._path.with_name(f"{self._path.name}.settings.json")
        settings = json.loads(json.dumps(settings))  # as they will be read back
        require(not self._path.is_dir(), f"{OUT} {path} is a folder; name a file in it")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if not overwrite:
                self._check(path, settings)
            self.is_complete = self._path.exists() and not overwrite
            self.num_lines = 0
            self._file: IO[bytes] | None = None
            if not self.is_complete:
                self._file = self._locked(path)
                if overwrite:
                    self._file.truncate(0)
                    self._path.unlink(missing_ok=True)
                replace_file(self._settings, json.dumps(settings, indent=1))
                self.num_lines = self._cut()
        except OSError as error:
            raise UserError(f"{OUT} {path}: {error.strerror}; name another file") from None

    def append(self, lines: Iterable[str]) -> None:
        """Write ``lines`` and sync them to disk."""
        assert self._file is not None, "the file is complete"
        # half of a surrogate pair, which JSON may hold, becomes its escape again
        self._file.write("".join(f"{line}\n" for line in lines).encode(errors="backslashreplace"))
        self._file.flush()
        os.fsync(self._file.fileno())

    def finish(self) -> None:
        """Give the file its name: all lines are written."""
        assert self._file is not None, "the file is complete"
        os.replace(self._partial, self._path)
        sync_file(self._path.parent)
        self.close()

    def close(self) -> None:
        """Close the file; a later start with the same settings continues it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _check(self, path: str, settings: dict[str, Any]) -> None:
        """Raise ``UserError`` where the files there are of other settings."""
        # NOTE: a kill before the settings are written leaves an empty partial file.
        if not self._path.exists() and not (
            self._partial.exists() and self._partial.stat().st_size > 0
        ):
            return  # also where another command's file was removed, and its settings were left
        require(
            self._settings.exists(),
            f"{OUT} {path} exists, and this command did not write it; name another file, or "
            "replace it with --overwrite",
        )
        try:
            before = json.loads(self._settings.read_text("utf-8"))
        except ValueError:
            before = None
        if not isinstance(before, dict):
            raise UserError(
                f"{OUT} {path}: {self._settings.name} is damaged; name another file, or replace "
                "it with --overwrite"
            )
        for name in sorted({*settings, *before}):
            old, new = before.get(name), settings.get(name)
            require(
                old == new,
                f"{OUT} {path} holds another command's answers: {name} was {_shown(old)} and is "
                f"{_shown(new)}; name another file, or replace it with --overwrite",
            )

    def _locked(self, path: str) -> IO[bytes]:
        file = open(self._partial, "ab+", opener=no_link)  # noqa: SIM115  closed by close
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise UserError(
                f"{OUT} {path}: another command is writing it; wait for it, or name another file"
            ) from None
        return file

    def _cut(self) -> int:
        """Remove a last line that a kill has cut short; returns the number of complete lines."""
        assert self._file is not None
        self._file.seek(0)
        count = end = 0
        for line in self._file:
            if not (line.endswith(b"\n") and _is_json(line)):
                break
            count, end = count + 1, end + len(line)
        self._file.truncate(end)
        self._file.seek(end)
        return count


def _is_json(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# -- answer lines ----------------------------------------------------------------------------------

_DIGITS = 7  # of a score: fp32 has no more


class AnswerLines:
    """The lines of ``dschat generate``: the data's columns and the answers.

    ``prompt`` is written as the model read it, text or messages, so that training on the file
    formats it alike. An answer to messages is stripped, as a chat template expects; one to plain
    text keeps its first space. Raises ``UserError`` where the data has a column of such a name.
    """

    def __init__(
        self, config: GenerateConfig, rows: Rows, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self._config, self._tokenizer = config, tokenizer
        scores: list[float | None] | None = [0.0] * config.n if config.has_rewards else None
        for name in self._new_columns("", [""] * config.n, [], [], scores):
            require(
                name not in rows.columns
                or (name == config.column_prefix + "prompt" and name in rows.prompt_columns),
                f"--data_path has a column {name} already; start the names of new columns with "
                "--column_prefix, such as new_",
            )

    def of(self, rows: list[Row], answers: Rollout, scores: list[float | None] | None) -> list[str]:
        """A line per row; ``answers`` and ``scores`` (S,) have n of each."""
        n = self._config.n
        prompts = [row.ids for row in rows for _ in range(n)]
        texts = whole_texts(self._tokenizer, prompts, answers.token_ids)
        lines = []
        for number, row in enumerate(rows):
            part = slice(number * n, (number + 1) * n)
            new = self._new_columns(
                row.prompt,
                [text if isinstance(row.prompt, str) else text.strip() for text in texts[part]],
                answers.finish_reasons[part],
                [len(ids) for ids in answers.token_ids[part]],
                None if scores is None else scores[part],
            )
            lines.append(json.dumps(row.columns | new, ensure_ascii=False, default=str))
        return lines

    def _new_columns(
        self,
        prompt: Content,
        texts: list[str],
        reasons: Sequence[str],
        num_tokens: list[int],
        scores: list[float | None] | None,
    ) -> dict[str, Any]:
        """The columns of a row's answers, their scores, and the answers that are picked."""
        config, columns = self._config, dict[str, Any](prompt=prompt, answers=texts)
        columns |= {"finish_reasons": reasons, "num_tokens": num_tokens}
        if scores is not None:
            rounded = [None if s is None else float(f"{s:.{_DIGITS}g}") for s in scores]
            columns["scores"] = rounded
            scored = [(-score, i) for i, score in enumerate(scores) if score is not None]
            ranked = [i for _, i in sorted(scored)]  # equal scores in the order of the answers
            if config.n == 1 or config.best_of:
                best = 0 if config.n == 1 else next(iter(ranked), None)
                columns["answer"] = None if best is None else texts[best]
                columns["score"] = None if best is None else rounded[best]
            if config.pairs:
                is_pair = bool(ranked) and scores[ranked[0]] != scores[ranked[-1]]
                columns["chosen"] = texts[ranked[0]] if is_pair else None
                columns["rejected"] = texts[ranked[-1]] if is_pair else None
        elif config.n == 1:
            columns["answer"] = texts[0]
        return {config.column_prefix + name: value for name, value in columns.items()}
