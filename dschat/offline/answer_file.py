"""Appends JSON lines to a file that a killed command continues.

Lines go to ``OUT.partial``, which becomes ``OUT`` when the last one is written, so ``OUT`` is
complete or absent. ``OUT.settings.json`` holds the settings that the lines depend on: another
command, or the same one with other settings, is refused.
"""

import fcntl
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from transformers import PreTrainedTokenizerBase

from dschat.config import UserError
from dschat.config.errors import require
from dschat.inference.protocol import Rollout
from dschat.models.continued_text import whole_texts
from dschat.offline.flags import GenerateConfig
from dschat.offline.rows import Row, Rows
from dschat.startup.files import no_link, replace_file, sync_file

FLAG = "--out"


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
        require(not self._path.is_dir(), f"{FLAG} {path} is a folder; name a file in it")
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
            raise UserError(f"{FLAG} {path}: {error.strerror}; name another file") from None

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
        if not self._settings.exists():
            # NOTE: a kill before the settings are written leaves an empty partial file.
            has_lines = self._partial.exists() and self._partial.stat().st_size > 0
            if self._path.exists() or has_lines:
                raise UserError(
                    f"{FLAG} {path} exists, and this command did not write it; name another file, "
                    "or replace it with --overwrite"
                )
            return
        try:
            before = json.loads(self._settings.read_text("utf-8"))
        except ValueError:
            before = None
        if not isinstance(before, dict):
            raise UserError(
                f"{FLAG} {path}: {self._settings.name} is damaged; name another file, or replace "
                "it with --overwrite"
            )
        for name in sorted({*settings, *before}):
            old, new = before.get(name), settings.get(name)
            if old != new:
                raise UserError(
                    f"{FLAG} {path} holds another command's answers: {name} was {_shown(old)} and "
                    f"is {_shown(new)}; name another file, or replace it with --overwrite"
                )

    def _locked(self, path: str) -> IO[bytes]:
        file = open(self._partial, "ab+", opener=no_link)  # noqa: SIM115  closed by close
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise UserError(
                f"{FLAG} {path}: another command is writing it; wait for it, or name another file"
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
        for name in self._names():
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
            of_row = [text if isinstance(row.prompt, str) else text.strip() for text in texts[part]]
            new = {
                "prompt": row.prompt,
                "answers": of_row,
                "finish_reasons": answers.finish_reasons[part],
                "num_tokens": [len(ids) for ids in answers.token_ids[part]],
            }
            new |= self._chosen(of_row, None if scores is None else scores[part])
            named = {self._config.column_prefix + key: value for key, value in new.items()}
            lines.append(json.dumps(row.columns | named, ensure_ascii=False, default=str))
        return lines

    def _names(self) -> list[str]:
        config = self._config
        names = ["prompt", "answers", "finish_reasons", "num_tokens"]
        one_score: list[float | None] | None = [0.0] * config.n if config.has_rewards else None
        names += self._chosen([""] * config.n, one_score)
        return [config.column_prefix + name for name in names]

    def _chosen(self, texts: list[str], scores: list[float | None] | None) -> dict[str, Any]:
        """The columns of scores, and of the answers that are picked."""
        config = self._config
        if scores is None:
            return {"answer": texts[0]} if config.n == 1 else {}
        rounded = [None if s is None else float(f"{s:.{_DIGITS}g}") for s in scores]
        columns: dict[str, Any] = {"scores": rounded}
        scored = [(-score, i) for i, score in enumerate(scores) if score is not None]
        ranked = [i for _, i in sorted(scored)]  # equal scores in the order of the answers
        best = ranked[0] if ranked else None
        if config.n == 1:
            columns |= {"answer": texts[0], "score": rounded[0]}
        elif config.best_of:
            columns["answer"] = None if best is None else texts[best]
            columns["score"] = None if best is None else rounded[best]
        if config.pairs:
            is_pair = best is not None and scores[best] != scores[ranked[-1]]
            columns["chosen"] = texts[ranked[0]] if is_pair else None
            columns["rejected"] = texts[ranked[-1]] if is_pair else None
        return columns
