"""Cuts a rank's rows of an optimizer step into micro-batches, by rows or by tokens.

By tokens, the fewest micro-batches within the budget are filled evenly: the largest rows first,
each into the least loaded one. Rows of one prompt share its tokens and stay together where they
fit.
"""

import heapq
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import dschat.distributed as dist

_MOST_ALIKE = 64  # rows of a micro-batch whose sizes bound its number


class RowTokens(NamedTuple):
    """What a row takes in a micro-batch: packed, and by its sequences where they are padded."""

    total: int  # tokens, packed
    longest: int  # tokens of its longest sequence
    num_sequences: int = 1
    prompt: bytes | None = None  # rows with equal prompts share its tokens; None: no other row does
    prompt_tokens: int = 0


def row_tokens(row: Mapping[str, Any]) -> RowTokens:
    """Of a row of ``sft_dataset``, or of ``preference_dataset``, whose answers share the prompt."""
    named = [ids for name, ids in row.items() if name.endswith("_ids") and name != "other_ids"]
    lengths = [len(ids) for ids in (*named, *row.get("other_ids", ()))]
    shared = (len(lengths) - 1) * row.get("prompt_length", 0)
    return RowTokens(sum(lengths) - shared, max(lengths), len(lengths))


@dataclass(frozen=True)
class MicroBatchSize:
    """The size of micro-batches: ``rows`` or, unless 0, ``tokens``.

    ``padded``: whether rows are padded to the longest of their micro-batch, which counts as tokens.
    A row of more than ``tokens`` is a micro-batch of its own.
    """

    rows: int
    tokens: int = 0
    padded: bool = False

    def split(self, rows: Sequence[RowTokens]) -> list[list[int]]:
        """Collective. Indices of this rank's ``rows`` by micro-batch: equally many on every rank,
        at least one, and the last ones empty on a rank that needs fewer.
        """
        if not self.tokens:
            starts = range(0, len(rows), self.rows)
            parts = [list(range(len(rows)))[i : i + self.rows] for i in starts]
        else:
            parts = (_padded if self.padded else _packed)(rows, self.tokens)
        count = dist.max_int(max(1, len(parts)))
        return parts + [[] for _ in range(count - len(parts))]


def spread(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Indices of ``sizes`` in ``count`` parts of about equal sums, by descending sum: the largest
    first, each into the least loaded part (LPT; Graham 1969).
    """
    parts: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, part) for part in range(count)]
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        load, part = loads[0]
        parts[part].append(i)
        heapq.heapreplace(loads, (load + sizes[i], part))
    return [parts[part] for _, part in sorted(loads, key=lambda load: -load[0])]


def _fewest(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """`spread` over as few parts as keep within ``limit``; a size above it is alone."""
    alone = [i for i, size in enumerate(sizes) if size > limit]
    if alone:
        others = [i for i, size in enumerate(sizes) if size <= limit]
        parts = _fewest([sizes[i] for i in others], limit) if others else []
        return [*([i] for i in alone), *([others[i] for i in part] for part in parts)]
    # A part holds at most k sizes above limit / (k + 1): else thousands of counts would be tried.
    ordered = sorted(sizes)
    above = (len(sizes) - bisect_right(ordered, limit // (k + 1)) for k in range(1, _MOST_ALIKE))
    count = max(1, -(-sum(sizes) // max(limit, 1)), *(-(-n // k) for k, n in enumerate(above, 1)))
    while True:  # ends at a part for each size
        parts = spread(sizes, count)
        if sum(sizes[i] for i in parts[0]) <= limit:
            return parts
        count += 1


def shares_of_ranks(rows: Sequence[RowTokens], budget: int, num_ranks: int) -> list[list[int]]:
    """Indices of the ``rows`` of all ranks by the rank that takes them, with about equal tokens, by
    descending tokens. Rows of one prompt stay together up to ``budget`` tokens.
    """
    blocks, sizes = _blocks(rows, budget)
    parts = spread(sizes, num_ranks)
    return [sorted(i for block in part for i in blocks[block]) for part in parts]


def _packed(rows: Sequence[RowTokens], budget: int) -> list[list[int]]:
    blocks, sizes = _blocks(rows, budget)
    return [sorted(i for block in part for i in blocks[block]) for part in _fewest(sizes, budget)]


def _blocks(rows: Sequence[RowTokens], budget: int) -> tuple[list[list[int]], list[int]]:
    """Indices of rows that stay together, and what they take: those of one prompt, if it fits."""
    groups: dict[bytes | int, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(i if row.prompt is None else row.prompt, []).append(i)
    blocks: list[list[int]] = []
    sizes: list[int] = []
    for members in groups.values():
        shared = rows[members[0]].prompt_tokens if len(members) > 1 else 0
        own = [rows[i].total - shared for i in members]
        for part in _fewest(own, budget - shared):
            blocks.append([members[i] for i in part])
            sizes.append(shared + sum(own[i] for i in part))
    return blocks, sizes


def _padded(rows: Sequence[RowTokens], budget: int) -> list[list[int]]:
    """Rows of similar length together: a micro-batch takes its sequences x the longest."""
    parts: list[list[int]] = []
    num_sequences = 0
    for i in sorted(range(len(rows)), key=lambda i: -rows[i].longest):
        num_sequences += rows[i].num_sequences
        if not parts or num_sequences * rows[parts[-1][0]].longest > budget:
            parts.append([])
            num_sequences = rows[i].num_sequences
        parts[-1].append(i)
    return [sorted(part) for part in parts]
