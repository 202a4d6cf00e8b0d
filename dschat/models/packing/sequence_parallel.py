"""Sequence parallelism: the ranks of a group compute one stream of tokens together (Ulysses,
arXiv 2309.14509).

In a forward the rows of all ranks of a group become one stream, which is cut evenly, whatever the
rows' borders. Each rank computes its tokens. For attention the ranks exchange tokens for heads and
back; a key or value head that fewer ranks than the group need is repeated. Log-probs and scores
return to the rank whose row they belong to. So batches, losses and optimizer steps do not know of
it, and the gradient is that of one rank for each row: every rank has a part of each sum. Layers
with recurrent states read whole rows, which the ranks share out.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from math import lcm
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

import dschat.distributed as dist
from dschat.config import UserError
from dschat.models.packing.rows import PackedRows
from dschat.models.packing.segments import Segments

_Send = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class Spread:
    """How the tokens of a stream lie on the ranks of ``group``: consecutive ones each."""

    group: dist.RankGroup
    tokens: tuple[int, ...]  # of each rank

    @property
    def own(self) -> slice:
        """This rank's places in the stream."""
        start = sum(self.tokens[: self.group.rank])
        return slice(start, start + self.tokens[self.group.rank])

    def own_heads(self, values: Tensor) -> Tensor:
        """The part of ``values`` (H,) that belongs to the heads of this rank."""
        return values.view(self.group.size, -1)[self.group.rank]

    def to_heads(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Collective. (1, H, own tokens, D) each to (1, H / ranks, all tokens, D)."""
        most = tensors[0].shape[1]
        repeated = [_repeated(x, self.group.size, most) for x in tensors]
        return _Exchanged.apply(self._send_tokens, self._send_heads, *repeated)

    def to_tokens(self, heads: Tensor) -> Tensor:
        """Collective. (1, H / ranks, all tokens, D) to (1, H, own tokens, D)."""
        return _Exchanged.apply(self._send_heads, self._send_tokens, heads)[0]

    def _send_tokens(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        size, counts = self.group.size, self.tokens
        n = counts[self.group.rank]
        # By receiving rank: its heads of every tensor.
        parts = [x.reshape(size, -1) for x in tensors]
        widths = [part.shape[1] // n for part in parts]  # elements a token
        sent = torch.cat(parts, dim=1)
        received = self.group.all_to_all(
            sent.flatten(), [sent.shape[1]] * size, [sum(widths) * count for count in counts]
        )
        pieces = received.split([width * count for count in counts for width in widths])
        by_tensor = [pieces[i :: len(tensors)] for i in range(len(tensors))]
        return tuple(
            torch.cat(
                [p.view(1, -1, n, x.shape[-1]) for p, n in zip(parts, counts, strict=True)], 2
            )
            for parts, x in zip(by_tensor, tensors, strict=True)
        )

    def _send_heads(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        size, counts = self.group.size, self.tokens
        n = counts[self.group.rank]
        pieces = [x.split(list(counts), dim=2) for x in tensors]
        sent = [piece.flatten() for by_rank in zip(*pieces, strict=True) for piece in by_rank]
        widths = [x.shape[1] * x.shape[3] for x in tensors]
        received = self.group.all_to_all(
            torch.cat(sent), [sum(widths) * count for count in counts], [sum(widths) * n] * size
        )
        by_tensor = received.view(size, -1).split([width * n for width in widths], dim=1)
        return tuple(
            part.reshape(1, size * x.shape[1], n, x.shape[3])
            for part, x in zip(by_tensor, tensors, strict=True)
        )

    def share_rows(
        self, rows: list[np.ndarray], owned: list[int], device: torch.device
    ) -> tuple[list[np.ndarray], list[int], int, dict[str, "Route"]]:
        """Give every rank some of a stream's ``rows``, about equally many tokens.

        Args:
            rows: the places of each row's tokens in the stream, ascending.
            owned: how many of its last ones are its own.

        Returns:
            This rank's rows, as places among the tokens that they read, with ``owned``; how many
            tokens they read; `RowTable.fetch` and `RowTable.give_back`.
        """
        ranks = range(self.group.size)
        loads = [0 for _ in ranks]
        members: list[list[int]] = [[] for _ in ranks]
        for i in sorted(range(len(rows)), key=lambda i: -len(rows[i])):
            taker = loads.index(min(loads))
            loads[taker] += len(rows[i])
            members[taker].append(i)
        none = np.zeros(0, np.int64)
        dummy = [np.zeros(1, np.int64)]  # of a rank without rows: all call a layer equally often
        read = [np.unique(np.concatenate([rows[i] for i in part] or dummy)) for part in members]
        own = [
            np.sort(np.concatenate([none, *(rows[i][-owned[i] :] for i in part)]))
            for part in members
        ]
        mine, tokens = members[self.group.rank], read[self.group.rank]
        routes = {"fetch": self._route(read, device), "give_back": self._route(own, device).back}
        places = [np.searchsorted(tokens, rows[i]) for i in mine]
        return places or dummy, [owned[i] for i in mine] or [0], len(tokens), routes

    def _route(self, wanted: list[np.ndarray], device: torch.device) -> "Route":
        """From the ranks that have a stream's tokens to those that want them: each rank's places in
        the stream, ascending.
        """
        cuts, me = np.cumsum([0, *self.tokens]), self.group.rank
        bounds = np.searchsorted(wanted[me], cuts)
        received = map(np.arange, bounds, bounds[1:])
        sent = [part[(cuts[me] <= part) & (part < cuts[me + 1])] - cuts[me] for part in wanted]
        there, here = (
            tuple(torch.from_numpy(part).to(device) for part in parts) for parts in (sent, received)
        )
        return Route(self.group, there, here, self.tokens[me], len(wanted[me]))

    def collected(self, values: Tensor, places: slice | Tensor, total: int) -> Tensor:
        """Collective. ``values`` (n, ...) of every rank at its ``places`` of (total, ...)."""

        def add_up(values: Tensor) -> tuple[Tensor]:
            whole = values.new_zeros(total, *values.shape[1:])
            whole[places] = values
            return (self.group.all_reduce_sum(whole),)

        def own_part(grad: Tensor) -> tuple[Tensor]:
            # Each rank's loss reads its own rows: the gradient is the sum over the ranks.
            return (self.group.all_reduce_sum(grad.clone())[places],)

        return _Exchanged.apply(add_up, own_part, values)[0]


def _repeated(x: Tensor, ranks: int, heads: int) -> Tensor:
    """Key or value heads, repeated so far that every rank gets those which its query heads read."""
    times = lcm(x.shape[1], ranks) // x.shape[1]
    assert heads % (x.shape[1] * times) == 0, "checked by `check_ranks`"
    return x.repeat_interleave(times, dim=1) if times > 1 else x


class _Exchanged(torch.autograd.Function):
    """Collective. ``send`` of tensors, and ``send_back`` of their gradients."""

    @staticmethod
    def forward(ctx: Any, send: _Send, send_back: _Send, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.send_back = send_back
        return send(*tensors)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.send_back(*grads)


@dataclass(frozen=True)
class Route:
    """Moves values of tokens from the ranks that have them to those that need them.

    ``sent``: by receiving rank, places among the ``given`` values of this rank; one value may go to
    several. ``received``: by sending rank, places among the ``wanted`` values.
    """

    group: dist.RankGroup
    sent: tuple[Tensor, ...]
    received: tuple[Tensor, ...]
    given: int
    wanted: int

    @cached_property
    def _places(self) -> Tensor:
        return torch.cat(self.sent)

    @cached_property
    def back(self) -> "Route":
        """The way back, on which values that meet at one place are added up."""
        return Route(self.group, self.received, self.sent, self.wanted, self.given)

    def __call__(self, values: Tensor) -> Tensor:
        """Collective. (given, ...) to (wanted, ...)."""
        return _Exchanged.apply(self._move, self.back._move, values)[0]

    def _move(self, values: Tensor) -> tuple[Tensor]:
        width = values.shape[1:].numel()
        sizes = [[width * len(places) for places in side] for side in (self.sent, self.received)]
        moved = self.group.all_to_all(values[self._places].flatten(), *sizes)
        out = values.new_zeros(self.wanted, *values.shape[1:])
        for places, part in zip(self.received, moved.split(sizes[1]), strict=True):
            out.index_add_(0, places, part.view(-1, *values.shape[1:]))  # no place twice in a part
        return (out,)


@dataclass(frozen=True)
class Share:
    """What this rank computes of the rows of its group."""

    rows: PackedRows  # its tokens and their columns; the segments are the whole stream's
    spread: Spread
    columns: Tensor  # (m,) int64, places of its columns among all ranks' columns
    num_columns: int  # of all ranks
    own_columns: slice  # of this rank's rows
    own_tokens: slice

    def own(self, values: Tensor) -> Tensor:
        """Collective. At the columns of this rank's rows, (M, ...), from what every rank computed
        at the columns of its tokens, (m, ...).
        """
        return self.spread.collected(values, self.columns, self.num_columns)[self.own_columns]

    def of_tokens(self, values: Tensor) -> Tensor:
        """Collective. Of this rank's rows (N, ...), from what every rank computed of its tokens."""
        total = sum(self.spread.tokens)
        return self.spread.collected(values, self.spread.own, total)[self.own_tokens]


def share_of(rows: PackedRows, group: dist.RankGroup) -> Share:
    """Collective. This rank's share of the ``rows`` of every rank of ``group``, on their device.

    NOTE: it waits for the device, once in a forward: sizes are not known before.
    """
    names = ("input_ids", "position_ids", "columns", "targets", "candidates", "experts")
    given = {name: getattr(rows, name) for name in names}
    own = {name: None if x is None else x.cpu().numpy() for name, x in given.items()}
    own |= {"num_rows": rows.num_rows, "lengths": rows.lengths, "groups": rows.segments.groups}
    members = group.gather_objects(own)
    starts = np.cumsum([0, *(len(m["input_ids"]) for m in members)])
    firsts = np.cumsum([0, *(len(m["columns"]) for m in members)])
    total, me = int(starts[-1]), group.rank
    cuts = [total * r // group.size for r in range(group.size + 1)]
    part = slice(cuts[me], cuts[me + 1])
    columns = [m["columns"] + start for m, start in zip(members, starts, strict=False)]
    places = np.concatenate(columns)
    mine = np.flatnonzero((part.start <= places) & (places < part.stop))

    def of_all(name: str) -> tuple:
        return tuple(x for m in members for x in m[name])

    def joined(name: str, chosen: slice | np.ndarray) -> Tensor:
        return torch.from_numpy(np.concatenate([m[name] for m in members])[chosen])

    if sizes := [m["experts"].shape[1:] for m in members if m["experts"] is not None]:
        for m in (m for m in members if m["experts"] is None):  # a dummy
            m["experts"] = np.full((len(m["input_ids"]), *sizes[0]), -1)
    spread = Spread(group, tuple(np.diff(cuts).tolist()))
    share = replace(
        rows,
        input_ids=joined("input_ids", part),
        position_ids=joined("position_ids", part),
        columns=torch.from_numpy(places[mine] - part.start),
        targets=joined("targets", mine),
        row_of=rows.row_of[:0],
        padded_ids=rows.padded_ids[:0],
        padded_columns=rows.padded_columns[:0],
        segments=Segments(of_all("groups"), spread=spread),
        num_rows=sum(m["num_rows"] for m in members),
        lengths=of_all("lengths"),
        candidates=None if rows.candidates is None else joined("candidates", mine),
        experts=joined("experts", part) if sizes else None,
    )
    device = rows.input_ids.device
    return Share(
        share.to(device),
        spread,
        torch.from_numpy(mine).to(device),
        int(firsts[-1]),
        slice(int(firsts[me]), int(firsts[me + 1])),
        slice(int(starts[me]), int(starts[me + 1])),
    )


def check_ranks(config: PretrainedConfig, size: int, name: str) -> None:
    """``UserError`` where ``--sequence_parallel_size`` divides not both heads and processes."""
    heads = getattr(config.get_text_config(), "num_attention_heads", size)
    for count, of in ((heads, f"heads of {name}"), (dist.world_size(), "processes")):
        if count % size:
            raise UserError(
                f"--sequence_parallel_size {size} does not divide the {count} {of}; choose a "
                "divisor"
            )
