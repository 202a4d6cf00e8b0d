"""Makes the output lines of ``dschat generate``: the data's columns and the answers.

``prompt`` is written as the model read it, text or messages, so that training on the file formats
it alike. An answer to messages is stripped, as a chat template expects; an answer to plain text
continues it and keeps its first space.
"""

import json
from typing import Any

from transformers import PreTrainedTokenizerBase

from dschat.config.errors import require
from dschat.inference.protocol import Rollout
from dschat.models.continued_text import whole_texts
from dschat.offline.flags import GenerateConfig
from dschat.offline.rows import Row, Rows

_DIGITS = 7  # of a score: fp32 has no more


class AnswerLines:
    """Lines for the rows of one command.

    Raises:
        UserError: the data has a column with the name of a new one.
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
