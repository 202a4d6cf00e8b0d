"""Packs rows of token ids into one stream without padding.

Rows with the same prompt share it: ``[prompt | answer | answer | ...]`` is one group, in which
every answer continues the prompt's positions and attends to the prompt and itself. A forward reads
the hidden states of chosen columns only, and predicts the ids that follow them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dschat.models.packing.segments import Segments
from dschat.models.packing.varlen import to_device

Ids = Sequence[int] | np.ndarray | Tensor


@dataclass
class PackedRows:
    """What every training-side forward takes: N tokens of which M columns are read.

    The columns stand in the order of the rows they were packed from.
    """

    input_ids: Tensor  # (N,) int64
    position_ids: Tensor  # (N,) int64, restarting with every row
    columns: Tensor  # (M,) int64, where hidden states are read
    targets: Tensor  # (M,) int64, the id after each column; 0 after a row's last token
    row_of: Tensor  # (M,) int64, the row that each column belongs to
    padded_ids: Tensor  # (B, T) int64, the rows right-padded, for models that cannot be packed
    padded_columns: Tensor  # (M,) int64, the columns in the flattened (B * T)
    segments: Segments
    num_rows: int  # 0 for a dummy
    lengths: tuple[int, ...]  # of the rows; (1,) for a dummy
    candidates: Tensor | None = None  # (M, K) int64, other ids whose log-probs a forward adds
    experts: Tensor | None = None  # (N, routers, k), that each token runs; -1: its own choice

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]

    def to(self, device: str | torch.device) -> "PackedRows":
        """These rows with every tensor on ``device``, in one copy."""
        return to_device(self, device)


def pack(
    rows: Sequence[Ids],
    reads: Sequence[Ids],
    prefix_lengths: Sequence[int] | None = None,
    experts: Sequence[Tensor] | None = None,
) -> PackedRows:
    """Pack ``rows``; none become one dummy token, of which nothing is read.

    Args:
        rows: token ids of each row, at least one each.
        reads: the columns to read of each row, counted from its start.
        prefix_lengths: tokens of each row's prompt. Rows whose prompts are equal share them; at
            least one token must follow a prompt. None: nothing is shared.
        experts: (T, routers, k) of each row.
    """
    arrays = [np.asarray(row, dtype=np.int64) for row in rows] or [np.zeros(1, np.int64)]
    where = [np.asarray(columns, dtype=np.int64) for columns in reads] or [np.zeros(0, np.int64)]
    lengths = [0] * len(arrays) if prefix_lengths is None else list(prefix_lengths) or [0]
    groups: dict[bytes | int, list[int]] = {}
    for i, (row, length) in enumerate(zip(arrays, lengths, strict=True)):
        key: bytes | int = row[:length].tobytes() if 0 < length < len(row) else i
        groups.setdefault(key, []).append(i)
    pieces: list[tuple[int, slice]] = []  # of a row, in the order of the stream
    segments: list[tuple[int, tuple[int, ...]]] = []
    columns: list[np.ndarray] = [np.zeros(0, np.int64)] * len(arrays)
    start = 0
    for members in groups.values():
        first, shares = members[0], len(members) > 1
        prefix = lengths[first] if shares else len(arrays[first])
        pieces.append((first, slice(prefix)))
        end = start + prefix
        for i in members:
            columns[i] = where[i] + np.where(where[i] < prefix, start, end - prefix)
            if shares:
                pieces.append((i, slice(prefix, None)))
                end += len(arrays[i]) - prefix
        answers = tuple(len(arrays[i]) - prefix for i in members if shares)
        segments.append((prefix, answers))
        start = end
    targets = [
        np.where(c + 1 < len(row), row[np.minimum(c + 1, len(row) - 1)], 0)
        for row, c in zip(arrays, where, strict=True)
    ]
    width = max(map(len, arrays))
    padded = np.zeros((len(arrays), width), np.int64)
    for line, row in zip(padded, arrays, strict=True):
        line[: len(row)] = row
    return PackedRows(
        input_ids=torch.from_numpy(np.concatenate([arrays[i][part] for i, part in pieces])),
        position_ids=torch.from_numpy(
            np.concatenate([np.arange(len(arrays[i]))[part] for i, part in pieces])
        ),
        columns=torch.from_numpy(np.concatenate(columns)),
        targets=torch.from_numpy(np.concatenate(targets)),
        row_of=torch.from_numpy(np.repeat(np.arange(len(where)), [len(c) for c in where])),
        padded_ids=torch.from_numpy(padded),
        padded_columns=torch.from_numpy(
            np.concatenate([c + i * width for i, c in enumerate(where)])
        ),
        segments=Segments(tuple(segments)),
        num_rows=len(rows),
        lengths=tuple(map(len, arrays)),
        experts=torch.cat([experts[i][part] for i, part in pieces]) if experts else None,
    )
