"""Collates rows of token ids into right-padded tensors.

Masks and lengths come from the rows' own lengths: the pad id is only a filler and may be the EOS
id.

An empty micro-batch becomes one dummy row without weight (``num_real`` 0): under ZeRO-3 a rank that
has run out of rows must still take part in every forward and backward.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Optional, Union

import torch
from torch import Tensor

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass
class _OnDevice:
    """Adds ``to`` to a dataclass of tensors."""

    def to(self, device: Union[str, torch.device]) -> "Self":
        """A copy with every tensor on ``device``."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return type(self)(
            **{k: v.to(device) if isinstance(v, Tensor) else v for k, v in values.items()}
        )


@dataclass
class SFTBatch(_OnDevice):
    """Step 1's micro-batch."""

    input_ids: Tensor  # (B, T) int64
    loss_mask: Tensor  # (B, T) bool, True where the token at t is a target
    num_real: int  # rows that are not dummies


@dataclass
class PairBatch(_OnDevice):
    """Step 2's micro-batch: chosen rows, then rejected ones in the same order, for one forward."""

    input_ids: Tensor  # (2B, T) int64
    lengths: Tensor  # (2B,) int64, tokens before the padding; the score stands at lengths - 1
    num_real: int  # pairs that are not dummies


@dataclass
class PreferenceBatch(_OnDevice):
    """Step 2's micro-batch for losses that train the policy: K blocks of B sequences in the same
    order, chosen, rejected and, for KTO, mismatched ones.
    """

    input_ids: Tensor  # (KB, T) int64
    prompt_lengths: Tensor  # (KB,) int64, tokens before the answer
    lengths: Tensor  # (KB,) int64, tokens before the padding
    ref_logps: Tensor  # (KB,) fp32, the reference's log-prob of the answer; NaN: not computed yet
    num_real: int  # pairs that are not dummies
    kl: float = 0.0  # KTO's reference point, over the whole optimizer step


def pad_right(
    sequences: Sequence[Sequence[int]],
    pad_id: int,
    length: Optional[int] = None,
    multiple_of: int = 1,
) -> tuple[Tensor, Tensor]:
    """Pad to the longest sequence, at least to ``length``, rounded up to ``multiple_of``.

    Returns:
        ids (B, T) int64, and mask (B, T) bool, True on the tokens of the sequences.
    """
    longest = max([length or 0, *map(len, sequences)])
    width = -(-longest // multiple_of) * multiple_of
    ids = torch.full((len(sequences), width), pad_id, dtype=torch.int64)
    for row, sequence in zip(ids, sequences, strict=True):
        row[: len(sequence)] = torch.tensor(sequence, dtype=torch.int64)
    lengths = torch.tensor([len(sequence) for sequence in sequences], dtype=torch.int64)
    return ids, torch.arange(width) < lengths[:, None]


def collate_sft(rows: Sequence[dict[str, Any]], pad_id: int, multiple_of: int = 1) -> SFTBatch:
    """Rows of ``sft_dataset`` to a batch. A dummy has no targets and two tokens, for the shift."""
    if not rows:
        dummy = torch.full((1, max(2, multiple_of)), pad_id)
        return SFTBatch(dummy, torch.zeros_like(dummy, dtype=torch.bool), num_real=0)
    ids, _ = pad_right([row["input_ids"] for row in rows], pad_id, multiple_of=multiple_of)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for target, row in zip(mask, rows, strict=True):
        target[: len(row["loss_mask"])] = torch.tensor(row["loss_mask"], dtype=torch.bool)
    return SFTBatch(ids, mask, num_real=len(rows))


def collate_pairs(rows: Sequence[dict[str, Any]], pad_id: int, multiple_of: int = 1) -> PairBatch:
    """Rows of ``preference_dataset`` to a batch. A dummy pair is two sequences of length 1."""
    sides = [row[side] for side in ("chosen_ids", "rejected_ids") for row in rows]
    ids, mask = pad_right(sides or [[pad_id]] * 2, pad_id, multiple_of=multiple_of)
    return PairBatch(ids, mask.sum(dim=1), num_real=len(rows))


def collate_preferences(
    rows: Sequence[dict[str, Any]], blocks: Sequence[str], pad_id: int
) -> PreferenceBatch:
    """Rows of ``preference_dataset`` to a batch of the columns named in ``blocks``. Rows may carry
    ``ref_logps``, one number per block. A dummy's sequences have no answer.
    """
    sequences = [row[block] for block in blocks for row in rows] or [[pad_id]] * len(blocks)
    ids, mask = pad_right(sequences, pad_id)
    prompt_lengths = [row["prompt_length"] for row in rows] or [1]
    unknown = [float("nan")] * len(blocks)
    known = [row.get("ref_logps", unknown) for row in rows] or [unknown]
    return PreferenceBatch(
        ids,
        torch.tensor(prompt_lengths * len(blocks)),
        mask.sum(dim=1),
        torch.tensor(known, dtype=torch.float32).T.flatten(),
        num_real=len(rows),
    )
