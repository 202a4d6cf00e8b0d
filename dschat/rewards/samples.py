"""The input of reward functions: prompts, answers and the columns of their rows.

No torch here: worker processes import this module and should start fast.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
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

    def __post_init__(self) -> None:
        self.chats = self.chats or list(self.prompts)

    @property
    def completions(self) -> list[Any]:
        """The answers as TRL gives them: a list of one message where the prompt is a chat."""
        return [
            [{"role": "assistant", "content": answer}] if isinstance(chat, list) else answer
            for chat, answer in zip(self.chats, self.answers, strict=True)
        ]

    def __len__(self) -> int:
        return len(self.answers)

    @classmethod
    def joined(cls, parts: "Sequence[Samples]") -> "Samples":
        """The samples of all ``parts``, which have the same columns."""
        names = [f.name for f in fields(cls) if f.name != "columns"]
        lists = {name: [v for part in parts for v in getattr(part, name)] for name in names}
        given = parts[0].columns if parts else {}
        columns = {name: [v for part in parts for v in part.columns[name]] for name in given}
        return cls(**lists, columns=columns)

    def arguments(self, sources: Mapping[str, str]) -> dict[str, list[Any]]:
        """Arguments of a call, of the column or name in `GIVEN` that each parameter gets."""
        return {
            name: getattr(self, GIVEN[source]) if source in GIVEN else self._column(source)
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
        return Samples(
            [self.prompts[row] for row in rows],
            [self.answers[row] for row in rows],
            [list(self.prompt_ids[row]) for row in rows],
            [list(self.answer_ids[row]) for row in rows],
            [self.finish_reasons[row] for row in rows],
            {name: [values[row] for row in rows] for name, values in self.columns.items()},
            [self.chats[row] for row in rows],
        )

    def part(self, start: int, stop: int) -> "Samples":
        """A copy of samples ``start`` to ``stop``, or to the last one."""
        return self.pick(range(start, min(stop, len(self))))

    def cuts(self, count: int) -> list[tuple[int, int]]:
        """At most ``count`` parts of similar size, as (start, stop).

        The samples of a prompt stay in one part, for functions that compare them.
        """
        size, cuts, start = len(self), [], 0
        for part in range(1, count + 1):
            stop = max(start, size * part // count)
            while 0 < stop < size and self.prompt_ids[stop] == self.prompt_ids[stop - 1]:
                stop += 1
            if stop > start:
                cuts.append((start, stop))
            start = stop
        return cuts

    def apart(self, rows: Sequence[int]) -> list[list[int]]:
        """``rows`` in lists where no two prompts are neighbours that are equal and were none: a
        function would take them for one.
        """
        lists: list[list[int]] = []
        for before, row in zip([None, *rows], rows, strict=False):
            fits = before is not None and (
                before == row - 1 or self.prompt_ids[before] != self.prompt_ids[row]
            )
            if fits:
                lists[-1].append(row)
            else:
                lists.append([row])
        return lists
