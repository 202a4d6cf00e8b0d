"""Describes which tokens of a packed stream attend to which.

A group is a prefix and the answers after it. An answer attends to itself and to the prefix. A row
that shares nothing is a prefix without answers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from dschat.models.packing.sequence_parallel import Spread

_Bounds = tuple[int, int]  # (first, last + 1)
Bounds = Sequence[_Bounds]

# Sequences are taken together where at least so many are alike, and a batch has room for so many:
# copying fewer or longer ones takes what their calls do.
_FEWEST, _SHORT = 4, 32
_LIKE = 0.75  # of a batch of padded rows the shortest, as a share of the longest


@dataclass(frozen=True)
class Lengths:
    """Variable-length sequences of queries and of keys, as FlashAttention takes them."""

    # Cumulative lengths of both, (S + 1,) int32 each, and the longest of each.
    arguments: tuple[Tensor, Tensor, int, int]
    places: tuple[Tensor, ...] = ()  # of queries and keys in the stream, int64; (): all tokens


@dataclass(frozen=True)
class Batch:
    """Sequences that attention takes in one call: one, or several short ones.

    ``queries``, ``keys``: their places in the stream; of several sequences (B, Q) and (B, K) int64.
    ``is_causal``: the keys are the queries' own tokens.
    """

    queries: slice | Tensor
    keys: slice | Tensor
    is_causal: bool


def _as_they_are(values: Tensor) -> Tensor:
    return values


@dataclass(frozen=True)
class RowTable:
    """The rows of a stream, each with its prefix, for layers that take rows.

    Where several ranks share a stream, each takes some rows; ``fetch`` and ``give_back`` are then
    collective. Else all tokens are here, and both return what they get.
    """

    batches: tuple[Tensor, ...]  # (B, T) int64 each, places in what was fetched; of padding, any
    places: Tensor  # (n,) int64, of the rows' own tokens in all batches, flattened
    # Values (N, ...) of the stream's tokens to values of the tokens that rows read, ascending.
    fetch: Callable[[Tensor], Tensor] = _as_they_are
    give_back: Callable[[Tensor], Tensor] = _as_they_are  # values at ``places`` to (N, ...)


@dataclass(frozen=True)
class Segments:
    """Lengths of a stream's groups, on the host."""

    groups: tuple[tuple[int, tuple[int, ...]], ...]  # (tokens of the prefix, of each answer)
    # Of all pieces, then of `shared`, if there are any. They move to the device with the rows.
    table: tuple[Lengths, ...] = field(default=(), compare=False, repr=False)
    # How the tokens lie on several ranks; None: all of them are here.
    spread: "Spread | None" = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.table:
            object.__setattr__(self, "table", _varlen_table(self))

    @cached_property
    def sequences(self) -> list[tuple[_Bounds, _Bounds]]:
        """(Bounds of what it reads of a prefix, its own bounds) of every prefix, which reads none,
        and every answer, in the stream's order.
        """
        found = []
        end = 0
        for prefix, answers in self.groups:
            start = end
            for read, length in ((0, prefix), *((prefix, length) for length in answers)):
                found.append(((start, start + read), (end, end + length)))
                end += length
        return found

    @property
    def pieces(self) -> list[_Bounds]:
        """The own bounds of `sequences`."""
        return [own for _, own in self.sequences]

    @cached_property
    def shared(self) -> list[tuple[_Bounds, _Bounds]]:
        """(Bounds of the prefix, bounds of its answers) of every group with answers."""
        found, end = [], 0
        for prefix, answers in self.groups:
            start, middle, end = end, end + prefix, end + prefix + sum(answers)
            if answers:
                found.append(((start, middle), (middle, end)))
        return found

    def batches(self, most: int) -> list[Batch]:
        """Every piece as queries of itself, then answers as queries of their prefixes.

        ``most``: tokens of several sequences; 0: each has a batch of its own.
        """
        if most not in self._batches:
            pieces = [(bounds, bounds) for bounds in self.pieces]
            self._batches[most] = _batches(pieces, most, True)
            shared = [(answers, prefix) for prefix, answers in self.shared]
            self._batches[most] += _batches(shared, most, False)
        return self._batches[most]

    @cached_property
    def _batches(self) -> dict[int, list[Batch]]:
        return {}

    def rows_on(self, device: torch.device, alike: bool = True) -> RowTable:
        """The rows as tensors on ``device``, where they stay: in batches of those that are
        ``alike`` in length, or in one.
        """
        key = device, alike
        if key not in self._row_tables:
            self._row_tables[key] = _row_table(self, device, _LIKE if alike else 0.0)
        return self._row_tables[key]

    @cached_property
    def _row_tables(self) -> dict[tuple[torch.device, bool], RowTable]:
        return {}

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest row, its prefix included."""
        lengths = (stop - start + end - own for (start, stop), (own, end) in self.sequences)
        return max(lengths, default=0)


def _batches(sequences: list[tuple[_Bounds, _Bounds]], most: int, is_causal: bool) -> list[Batch]:
    """Of (bounds of the queries, bounds of the keys)."""
    alike: dict[tuple[int, int], list[tuple[_Bounds, _Bounds]]] = {}
    for sequence in sequences:
        # NOTE: the same lengths, no padding: then results do not depend on other sequences.
        of_queries, of_keys = (end - first for first, end in sequence)
        alike.setdefault((of_queries, of_keys), []).append(sequence)
    batches = []
    for kind, members in alike.items():
        if len(members) < _FEWEST or max(kind) * _SHORT > most:
            batches += [Batch(slice(*q), slice(*k), is_causal) for q, k in members]
            continue
        for part in torch.tensor(members).split(most // kind[0]):  # (B, 2, 2)
            starts = part[:, :, :1].unbind(1)
            queries, keys = (x + torch.arange(n) for x, n in zip(starts, kind, strict=True))
            batches.append(Batch(queries, keys, is_causal))
    return batches


def _row_table(segments: Segments, device: torch.device, like: float) -> RowTable:
    """``like``: the shortest row of a batch, as a share of its longest."""
    rows, owned = _rows(segments)
    total = sum(owned)
    exchange: dict[str, Any] = {}
    if segments.spread is not None:
        rows, owned, total, exchange = segments.spread.share_rows(rows, owned, device)
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
    batches, found, start = [], np.full(total, -1), 0
    while order:
        longest = len(rows[order[0]])
        members = [i for i in order if len(rows[i]) >= like * longest]
        order = order[len(members) :]
        batch = np.zeros((len(members), longest), np.int64)
        for line, i in enumerate(members):
            size, first = len(rows[i]), len(rows[i]) - owned[i]
            batch[line, :size] = rows[i]
            found[rows[i][first:]] = start + line * longest + np.arange(first, size)
        batches.append(torch.from_numpy(batch).to(device))
        start += batch.size
    return RowTable(tuple(batches), torch.from_numpy(found[found >= 0]).to(device), **exchange)


def _rows(segments: Segments) -> tuple[list[np.ndarray], list[int]]:
    """The places of each row's tokens in the stream, ascending, and how many of its last ones are
    its own: no other row's.
    """
    rows: list[np.ndarray] = []
    owned: list[int] = []
    end = 0
    for prefix, answers in segments.groups:
        places, end = np.arange(end, end + prefix), end + prefix
        for number, length in enumerate(answers or (0,)):
            rows.append(np.concatenate([places, np.arange(end, end + length)]))
            owned.append(length + (0 if number else prefix))  # the first row's
            end += length
    return rows, owned


def _varlen_table(segments: Segments) -> tuple[Lengths, ...]:
    table = [_lengths(segments.pieces, segments.pieces)]
    if segments.shared:
        prefixes, answers = zip(*segments.shared, strict=True)
        table.append(_lengths(answers, prefixes, (_places(answers), _places(prefixes))))
    return tuple(table)


def _lengths(queries: Bounds, keys: Bounds, places: tuple[Tensor, ...] = ()) -> Lengths:
    of_queries, of_keys = ([end - start for start, end in bounds] for bounds in (queries, keys))
    longest = max(of_queries, default=0), max(of_keys, default=0)
    return Lengths((_cumulative(of_queries), _cumulative(of_keys), *longest), places)


def _cumulative(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)


def _places(bounds: Bounds) -> Tensor:
    return torch.cat([torch.arange(start, end) for start, end in bounds])
