"""What reward functions get: answers, their prompts and the columns of their rows.

No torch here: worker processes import this module and should start fast.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

from dschat.config.data import look_up

# Parameter of a reward function -> attribute of `Samples`. TRL's names work too.
GIVEN = {
    "prompts": "prompts",
    "prompt_messages": "chats",
    "answers": "answers",
    "completions": "completions",
    "prompt_ids": "prompt_ids",
    "answer_ids": "answer_ids",
    "completion_ids": "answer_ids",
    "finish_reasons": "finish_reasons",
}
# Likewise, of the adapters in `conventions` alone, for trainers that give prompts as rendered; no
# column has such a name.
INNER = {"_prompts": "whole_prompts", "_queries": "queries"}
_LISTS = ("prompts", "answers", "prompt_ids", "answer_ids", "finish_reasons", "chats")


@dataclass
class Samples:
    """S answers of this rank. The samples of one prompt are adjacent."""

    prompts: list[str]  # (S,)
    answers: list[str]  # (S,)
    prompt_ids: list[list[int]]  # (S,) of token ids
    answer_ids: list[list[int]]  # (S,) of token ids, EOS included
    finish_reasons: list[str]  # (S,) "stop" or "length"
    columns: dict[str, list[Any]] = field(default_factory=dict)  # name -> (S,), from the data
    chats: list[Any] = field(default_factory=list)  # (S,) prompts, as messages where they are chats
    decode: Callable[[list[int]], str] | None = None  # of token ids, special ones too, if known

    def __post_init__(self) -> None:
        self.chats = self.chats or list(self.prompts)

    @property
    def completions(self) -> list[Any]:
        """The answers as TRL gives them: a list of one message where the prompt is a chat."""
        return [
            [{"role": "assistant", "content": answer}] if isinstance(chat, list) else answer
            for chat, answer in zip(self.chats, self.answers, strict=True)
        ]

    @property
    def whole_prompts(self) -> list[str]:
        """The prompts as the model read them: of chats, as their template renders them."""
        return [*map(self.decode, self.prompt_ids)] if self.decode else self.prompts

    @property
    def queries(self) -> list[str]:
        """Prompts and answers, as the model read and wrote them."""
        if self.decode is None:
            return [*map(str.__add__, self.prompts, self.answers)]
        pairs = zip(self.prompt_ids, self.answer_ids, strict=True)
        return [self.decode(prompt + answer) for prompt, answer in pairs]

    def __len__(self) -> int:
        return len(self.answers)

    @classmethod
    def joined(cls, parts: "Sequence[Samples]") -> "Samples":
        """The samples of all ``parts``, which have the same columns."""
        lists: dict[str, Any] = {
            name: [v for part in parts for v in getattr(part, name)] for name in _LISTS
        }
        first = parts[0] if parts else Samples(**lists)
        columns = {n: [v for part in parts for v in part.columns[n]] for n in first.columns}
        return replace(first, **lists, columns=columns)

    def arguments(self, sources: Mapping[str, str]) -> dict[str, list[Any]]:
        """Arguments of a call, of the column or name in `GIVEN` that each parameter gets."""
        known = GIVEN | INNER
        return {
            name: getattr(self, known[source]) if source in known else self._column(source)
            for name, source in sources.items()
        }

    def _column(self, path: str) -> list[Any]:
        """A column, or a path into the values of one, such as ``reward_model.ground_truth``."""
        if path in self.columns:
            return self.columns[path]
        name = path.partition(".")[0]
        return [look_up({name: value}, path) for value in self.columns[name]]

    def pick(self, rows: Sequence[int]) -> "Samples":
        """A copy of samples ``rows``."""
        columns = {name: [of[row] for row in rows] for name, of in self.columns.items()}
        picked: dict[str, Any] = {"columns": columns}
        for name in _LISTS:
            picked[name] = [copy(getattr(self, name)[row]) for row in rows]
        return replace(self, **picked)

    def cuts(self, rows: Sequence[int], count: int) -> list[Sequence[int]]:
        """``rows`` in at most ``count`` parts of similar size.

        The samples of a prompt stay in one part, for functions that compare them.
        """
        size, cuts, start = len(rows), list[Sequence[int]](), 0
        for part in range(1, count + 1):
            stop = max(start, size * part // count)
            while 0 < stop < size and self._are_alike(rows[stop - 1], rows[stop]):
                stop += 1
            if stop > start:
                cuts.append(rows[start:stop])
            start = stop
        return cuts

    def apart(self, rows: Sequence[int]) -> list[list[int]]:
        """``rows`` in lists without neighbours that have equal prompts and were not neighbours
        before: a function would take them for one prompt.
        """
        lists: list[list[int]] = []
        for before, row in zip([None, *rows], rows, strict=False):
            if before is None or (before != row - 1 and self._are_alike(before, row)):
                lists.append([])
            lists[-1].append(row)
        return lists

    def _are_alike(self, row: int, other: int) -> bool:
        return self.prompt_ids[row] == self.prompt_ids[other]
