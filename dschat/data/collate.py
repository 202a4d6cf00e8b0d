"""Collates rows of token ids into packed micro-batches.

A micro-batch without rows has ``num_real`` 0 and one dummy token, of which nothing is read: under
ZeRO-3 a rank that has run out of rows must still take part in every forward and backward.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, Union

import numpy as np
import torch
from torch import Tensor

from dschat.data.sources.ranking import ranked_pairs
from dschat.models.packing import PackedRows, pack
from dschat.models.packing.device_copy import to_device

Batch = TypeVar("Batch", bound="PackedBatch")


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
