"""Cuts a rank's rows of an optimizer step into micro-batches, and packs their token ids.

By rows, or by tokens: then the fewest micro-batches within the budget are filled evenly, the
largest rows first, each into the least loaded one. Rows of one prompt share its tokens and stay
together where they fit.

A micro-batch without rows has ``num_real`` 0 and one dummy token, of which nothing is read: under
ZeRO-3 a rank that has run out of rows must still take part in every forward and backward.
"""

import heapq
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, Union

import numpy as np
import torch
from torch import Tensor

import dschat.distributed as dist
from dschat.models.packing import PackedRows, pack
from dschat.models.packing.varlen import to_device

Batch = TypeVar("Batch", bound="PackedBatch")
_MOST_ALIKE = 64  # rows of a micro-batch whose sizes bound its number


class RowTokens(NamedTuple):
    """What a row takes in a micro-batch: packed, and by its sequences where they are padded."""

    total: int  # tokens, packed
    longest: int  # tokens of its longest sequence
    num_sequences: int = 1
    # Rows of one prompt share its ``prompt_tokens``; None: no other row does.
    prompt: bytes | None = None
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

    With sequence parallelism ``ranks`` compute each micro-batch together, of rows of one of them,
    in turn; ``tokens`` are what each computes.

    ``padded``: whether rows are padded to the longest of their micro-batch, which counts as tokens;
    rows of like length are together then. A row of more than ``tokens`` is a micro-batch of its
    own. ``by_row``: whether some layers read each row with its prompt, which counts as tokens.
    """

    rows: int
    tokens: int = 0
    padded: bool = False
    ranks: int = 1
    by_row: bool = False

    def split(self, rows: Sequence[RowTokens]) -> list[list[int]]:
        """Collective. Indices of this rank's ``rows`` by micro-batch: equally many on every rank,
        at least one, and the last ones empty on a rank that needs fewer.
        """
        if not self.tokens:
            order = _longest_first(rows) if self.padded else list(range(len(rows)))
            parts = [sorted(order[i : i + self.rows]) for i in range(0, len(rows), self.rows)]
        else:
            if self.by_row:
                sizes = [row.num_sequences * row.longest for row in rows]
                rows = [
                    r._replace(total=n, prompt_tokens=0) for r, n in zip(rows, sizes, strict=True)
                ]
            parts = (_padded if self.padded else _packed)(rows, self.tokens * self.ranks)
        count = dist.max_int(max(1, len(parts)))
        turns: list[list[int]] = [[] for _ in range(count * self.ranks)]
        for i, part in enumerate(parts):
            turns[i * self.ranks + dist.rank() % self.ranks] = part
        return turns


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
    """Indices of rows that stay together, and what they take: rows of one prompt, if they fit."""
    groups: dict[Any, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(i if row.prompt is None else (row.prompt,), []).append(i)
    blocks: list[list[int]] = []
    sizes: list[int] = []
    for members in groups.values():
        shared = [rows[i].prompt_tokens for i in members]
        own = [rows[i].total - rows[i].prompt_tokens for i in members]
        for part in _fewest(own, budget - max(shared)):
            blocks.append([members[i] for i in part])
            sizes.append(max(shared[i] for i in part) + sum(own[i] for i in part))
    return blocks, sizes


def _padded(rows: Sequence[RowTokens], budget: int) -> list[list[int]]:
    """A micro-batch takes its sequences x the longest."""
    parts: list[list[int]] = []
    num_sequences = 0
    for i in _longest_first(rows):
        num_sequences += rows[i].num_sequences
        if not parts or num_sequences * rows[parts[-1][0]].longest > budget:
            parts.append([])
            num_sequences = rows[i].num_sequences
        parts[-1].append(i)
    return [sorted(part) for part in parts]


def _longest_first(rows: Sequence[RowTokens]) -> list[int]:
    return sorted(range(len(rows)), key=lambda i: -rows[i].longest)


# -- tensors


@dataclass
class PackedBatch:
    """A micro-batch for one forward."""

    rows: PackedRows
    num_real: int  # rows that are not dummies

    def to(self: Batch, device: Union[str, torch.device]) -> Batch:
        return to_device(self, device)


@dataclass
class WeightedBatch(PackedBatch):
    """Step 1's micro-batch, which reads the columns before the targets."""

    weights: Tensor | None  # (M,) fp32, of the targets in the loss; None: all 1
    weight: float  # their sum


@dataclass
class RankedBatch(PackedBatch):
    """Step 2's micro-batch for a reward model: reads the last token of every answer. All chosen
    answers, then the rejected ones in the same order, then the others of each row.
    """

    better: Tensor  # (pairs,) int64, answers that rank above `worse`
    worse: Tensor  # (pairs,) int64
    weights: Tensor  # (pairs,) fp32, 1 / the pairs of the row


@dataclass
class PreferenceBatch(PackedBatch):
    """Step 2's micro-batch for losses that train the policy: K blocks of B sequences in the same
    order, chosen, rejected and, for KTO, mismatched ones. Rows read what predicts their answers.

    ``rows`` are the chosen, then the rejected sequences.
    """

    mismatched: PackedRows | None
    ref_logps: Tensor  # (KB,) fp32, the reference's log-prob of the answer; NaN: not computed yet
    present: Tensor  # (2B,) fp32, 0 for the side of an unpaired answer's row that has none
    kl: float = 0.0  # KTO's reference point, over the whole optimizer step


def collate_sft(rows: Sequence[dict[str, Any]]) -> WeightedBatch:
    """Rows of ``sft_dataset`` to a batch. A row's first token has no prediction: no target."""
    masks = [np.asarray(row["loss_mask"], dtype=bool) for row in rows]
    reads = [np.flatnonzero(mask[1:]) for mask in masks]
    weights, weight = None, float(sum(map(len, reads)))
    if any(row.get("weights") for row in rows):
        given = [row["weights"] or row["loss_mask"] for row in rows]
        chosen = [np.asarray(w)[1:][read] for w, read in zip(given, reads, strict=True)]
        weights = torch.from_numpy(np.concatenate(chosen).astype(np.float32))
        weight = float(weights.sum())
    packed = pack([row["input_ids"] for row in rows], reads)
    return WeightedBatch(packed, len(rows), weights, weight)


def collate_pairs(rows: Sequence[dict[str, Any]]) -> RankedBatch:
    """Rows of ``preference_dataset`` to a batch."""
    n = len(rows)
    sequences = [row[side] for side in ("chosen_ids", "rejected_ids") for row in rows]
    owners = [*range(n), *range(n)]
    pairs: list[tuple[int, int, float]] = []
    for i, row in enumerate(rows):
        others = row.get("other_ids") or []
        answers = [i, n + i, *range(len(sequences), len(sequences) + len(others))]
        sequences += others
        owners += [i] * len(others)
        compared = ranked_pairs(row.get("ranks") or [0, 1])
        pairs += [(answers[a], answers[b], 1 / len(compared)) for a, b in compared]
    prompts = [rows[i].get("prompt_length", 0) for i in owners]
    better, worse, weights = zip(*pairs, strict=True) if pairs else ((), (), ())
    return RankedBatch(
        pack(sequences, [[len(ids) - 1] for ids in sequences], prompts),
        n,
        torch.tensor(better, dtype=torch.int64),
        torch.tensor(worse, dtype=torch.int64),
        torch.tensor(weights, dtype=torch.float32),
    )


def collate_preferences(rows: Sequence[dict[str, Any]], blocks: Sequence[str]) -> PreferenceBatch:
    """Rows of ``preference_dataset`` to a batch of the columns named in ``blocks``. Rows may carry
    ``ref_logps``, one number per block.
    """
    unknown = [float("nan")] * len(blocks)
    known = [row.get("ref_logps", unknown) for row in rows]
    pair, mismatched = blocks[:2], blocks[2:]
    present = [len(row[side]) > row["prompt_length"] for side in pair for row in rows]
    return PreferenceBatch(
        _answers(rows, pair),
        len(rows),
        _answers(rows, mismatched) if mismatched else None,
        torch.tensor(known, dtype=torch.float32).reshape(len(rows), len(blocks)).T.flatten(),
        torch.tensor(present, dtype=torch.float32),
    )


def _answers(rows: Sequence[dict[str, Any]], blocks: Sequence[str]) -> PackedRows:
    """The sequences of ``blocks``, reading the columns that predict their answers."""
    sequences = [row[block] for block in blocks for row in rows]
    starts = [row["prompt_length"] for row in rows] * len(blocks)
    reads = [range(p - 1, len(ids) - 1) for ids, p in zip(sequences, starts, strict=True)]
    return pack(sequences, reads, starts)


def ranked_pairs(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """(better, worse) indices of all answers that do not tie."""
    k = len(ranks)
    return [(i, j) for i in range(k) for j in range(k) if ranks[i] < ranks[j]]
