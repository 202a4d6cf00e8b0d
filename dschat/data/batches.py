"""Splits rows into optimizer steps, and each step's rows over ranks.

Ranks do not communicate: each computes the same permutation, and takes its own share.

The rows of global batch k of epoch e depend on (seed, e, global batch size) alone. So runs with the
same global batch size take the same optimizer steps, for any number of ranks and any
micro-batches (`dschat.data.micro_batches`).
"""

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np
from datasets import Dataset

import dschat.distributed as dist
from dschat.data.micro_batches import MicroBatchSize, row_tokens, shares_of_ranks
from dschat.data.sources.adapters import Content
from dschat.data.sources.tables import iterate

Rows = list[Any]


class RowTable(Protocol):
    """A table of rows: a list, a `datasets.Dataset`, or another class with these two methods."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def check_same_rows(*tables: RowTable) -> None:
    """Collective. ``UserError`` where ranks have another number of rows, or other ones: the first,
    the last and one between are compared.
    """
    for rows in tables:
        size = len(rows)
        some = [rows[i] for i in sorted({0, size // 2, size - 1})] if size else []
        digest = blake2b(repr(some).encode(), digest_size=4).hexdigest()
        dist.check_same({"set of rows": f"{size} rows, digest {digest}"})


@dataclass
class StepBatches:
    """One rank's view of a data set as optimizer steps.

    With a token budget in ``size`` the shares are balanced by tokens, for which every rank reads
    all rows. The readers of the shares cut them into micro-batches.
    """

    dataset: RowTable
    global_batch_size: int  # rows of one optimizer step, over all ranks and micro-batches
    size: MicroBatchSize
    rank: int  # the share of every global batch to take
    world_size: int
    seed: int  # of the permutation, together with the epoch
    shuffle: bool = True  # False: the order of the rows (evaluation: each row once, over all ranks)
    drop_last: bool = False  # drop a last global batch that is not full
    ordered_by: np.ndarray | None = None  # (N,): epochs go from the lowest to the highest

    def __post_init__(self) -> None:
        assert self.global_batch_size >= 1, self.global_batch_size
        assert 0 <= self.rank < self.world_size, (self.rank, self.world_size)

    def __len__(self) -> int:
        """Optimizer steps per epoch."""
        full, rest = divmod(len(self.dataset), self.global_batch_size)
        return full + (rest > 0 and not self.drop_last)

    def epoch_of(self, step: int) -> int:
        """The epoch that optimizer step number ``step`` (from 0) belongs to."""
        return step // max(1, len(self))

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Any]:
        """This rank's rows of each optimizer step of an epoch; ``first_step`` > 0 resumes.

        Shares of a global batch differ by at most one row, unless they are balanced by tokens.
        """
        dataset, size = self.dataset, self.global_batch_size
        order = np.arange(len(dataset))
        if self.shuffle:
            order = np.random.default_rng([self.seed, epoch]).permutation(len(dataset))
        if self.ordered_by is not None:
            order = order[: len(self) * size]  # a batch that is dropped is a random one
            order = order[np.argsort(self.ordered_by[order], kind="stable")]
        for step in range(first_step, len(self)):
            indices = order[step * size : (step + 1) * size].tolist()
            if self.size.tokens:
                rows = [dataset[i] for i in indices]
                tokens = [row_tokens(row) for row in rows]
                parts = shares_of_ranks(tokens, self.size.tokens, self.world_size)
                yield [rows[i] for i in parts[self.rank]]
            else:
                yield [dataset[i] for i in self._share(indices)]

    def _share(self, rows: Rows) -> Rows:
        """This rank's part of a global batch: contiguous, so that a row's number in the batch
        follows from its rank and its index there.
        """
        first, last = (len(rows) * r // self.world_size for r in (self.rank, self.rank + 1))
        return rows[first:last]


@dataclass
class PromptTable:
    """Prompts by column, each list with one entry per prompt; also a sequence of their ids.

    Attributes:
        sources: text or chat messages; None if unknown.
        texts: the text, or the last user turn; None if unknown.
        columns: the other columns of the prompts' rows.
        inputs: what the chat template gets beside the messages; None if unknown.
        places: their rows in the table that they were drawn from; None if unknown.
    """

    ids: list[list[int]] = field(default_factory=list)
    sources: list[Content] | None = None
    texts: list[str] | None = None
    columns: dict[str, list[Any]] = field(default_factory=dict)
    inputs: list[dict[str, Any]] | None = None
    places: list[int] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.ids)

    def __getitem__(self, row: int) -> list[int]:
        return self.ids[row]

    def pick(self, rows: list[int]) -> "PromptTable":
        def picked(values: Any) -> Any:
            if isinstance(values, dict):
                return {name: picked(column) for name, column in values.items()}
            return None if values is None else [values[row] for row in rows]

        return PromptTable(**picked(vars(self)))

    def concat(self, other: "PromptTable") -> "PromptTable":
        if not self.ids or not other.ids:
            return self if self.ids else other
        both = sorted(set(self.columns) & set(other.columns))

        def joined(mine: Any, theirs: Any) -> Any:
            return mine + theirs if mine and theirs else None

        return PromptTable(
            self.ids + other.ids,
            joined(self.sources, other.sources),
            joined(self.texts, other.texts),
            {name: self.columns[name] + other.columns[name] for name in both},
            joined(self.inputs, other.inputs),
            joined(self.places, other.places),
        )


def position_of(items: Iterator[Any] | None) -> int:
    """Items taken so far: the attribute ``position`` of ``items``, 0 without; see `Endless`."""
    return getattr(items, "position", 0)


def seek(items: Iterator[Any] | None, position: int) -> None:
    """Continue after so many items, if ``items`` can: by assigning their ``position``."""
    if items is not None and hasattr(items, "position"):
        items.position = position


class Endless(Iterator[Any]):
    """The steps of all epochs of ``batches``. A run resumes in its data by ``position``, the number
    of items taken so far.
    """

    def __init__(self, batches: StepBatches) -> None:
        self._batches = batches
        self.position = 0

    @property
    def position(self) -> int:
        return self._position

    @position.setter
    def position(self, position: int) -> None:
        self._position, self._items = position, self._from(position)

    def __next__(self) -> Any:
        item = next(self._items)
        self._position += 1
        return item

    def _from(self, step: int) -> Iterator[Any]:
        epoch, first = divmod(step, len(self._batches))
        while True:
            yield from self._batches.epoch(epoch, first)
            epoch, first = epoch + 1, 0


class PromptBatches(StepBatches):
    """Step 3's data loader: yields this rank's prompts of each rollout as `PromptTable`.

    Each pass is the next epoch. A last rollout that is not full is dropped, unless it is the only
    one.

    Args:
        dataset: rows of ``prompt_dataset``.
        rollout_prompts: prompts of one rollout, over all ranks.
        rank, world_size, seed, ordered_by: as in ``StepBatches``.
    """

    def __init__(
        self,
        dataset: RowTable,
        rollout_prompts: int,
        rank: int,
        world_size: int,
        seed: int,
        ordered_by: np.ndarray | None = None,
    ) -> None:
        self._columns = prompt_columns(dataset)
        size = MicroBatchSize(rollout_prompts)
        super().__init__(
            *(dataset, rollout_prompts, size, rank, world_size, seed),
            drop_last=len(dataset) >= rollout_prompts,
            ordered_by=ordered_by,
        )
        self._epoch = 0

    def __iter__(self) -> Iterator[PromptTable]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        yield from self.epoch(epoch)

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[PromptTable]:
        for rows in super().epoch(epoch, first_step):
            yield prompts_of(rows, self._columns)

    def at(self, places: list[int]) -> PromptTable:
        """This rank's share of the rows at ``places``."""
        mine = self._share(places)
        return replace(prompts_of([self.dataset[i] for i in mine], self._columns), places=mine)


def prompts_of(rows: Rows, columns: Collection[str] | None = None) -> PromptTable:
    """Rows of ``prompt_dataset`` as prompts; ``sources``, ``texts`` and ``inputs`` if all rows have
    one.

    ``columns``: see ``prompt_columns``; default: the columns of these rows.
    """
    others = [json.loads(row.get("columns", "null")) or {} for row in rows]
    if columns is None:
        columns = {name for row in others for name in row}
    sources = [json.loads(row["prompt"]) for row in rows if "prompt" in row]
    texts = [row["prompt_text"] for row in rows if "prompt_text" in row]
    inputs = [json.loads(row["inputs"]) for row in rows if "inputs" in row]
    return PromptTable(
        [row["prompt_ids"] for row in rows],
        sources if len(sources) == len(rows) else None,
        texts if len(texts) == len(rows) else None,
        {name: [row.get(name) for row in others] for name in sorted(columns)},
        inputs if len(inputs) == len(rows) else None,
    )


def prompt_columns(dataset: RowTable) -> set[str]:
    """Names of the columns that rows of ``prompt_dataset`` carry for reward functions: all columns
    of their source except the prompt.
    """
    rows = rows_of(dataset, ("columns",))
    return {name for row in rows for name in json.loads(row.get("columns", "null")) or ()}


def rows_of(table: RowTable, columns: tuple[str, ...]) -> Iterator[Any]:
    """The rows of ``table`` with these ``columns`` or more, in order."""
    return iterate(table, columns) if isinstance(table, Dataset) else iter(table)
