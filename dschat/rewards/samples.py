"""The input of reward functions: prompts, answers and the columns of their rows.

No torch here: worker processes import this module and should start fast.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Samples:
    """S answers of this rank. The samples of one prompt are adjacent."""

    prompts: list[str]  # (S,)
    answers: list[str]  # (S,)
    prompt_ids: list[list[int]]  # (S,) of token ids
    answer_ids: list[list[int]]  # (S,) of token ids, EOS included
    finish_reasons: list[str]  # (S,) "stop" or "length"
    columns: dict[str, list[Any]] = field(default_factory=dict)  # name -> (S,), from the data

    def __len__(self) -> int:
        return len(self.answers)

    def part(self, start: int, stop: int) -> "Samples":
        """A copy of samples ``start`` to ``stop``."""
        return Samples(
            self.prompts[start:stop],
            self.answers[start:stop],
            [list(ids) for ids in self.prompt_ids[start:stop]],
            [list(ids) for ids in self.answer_ids[start:stop]],
            self.finish_reasons[start:stop],
            {name: values[start:stop] for name, values in self.columns.items()},
        )

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
