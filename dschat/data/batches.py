"""Splits rows into optimizer steps, and each step's rows over ranks.

Ranks do not communicate: each computes the same permutation, or reads the same stream, and takes
its own share.

The rows of global batch k of epoch e depend on (seed, e, global batch size) alone. So runs with the
same global batch size take the same optimizer steps, for any number of ranks and any
micro-batches (`dschat.data.micro_batches`).
"""

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol, Union, runtime_checkable

import numpy as np

from dschat.data.micro_batches import MicroBatchSize, row_tokens, spread
from dschat.data.sources.columns import unpack, unpacked_names

Rows = list[Any]


class RowTable(Protocol):
    """A table of rows: a list, a `datasets.Dataset`, or another class with these two methods."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass
class RowStream:
    """Endless rows, in a random order that is the same on every rank.

    ``examples`` starts the stream; ``encode`` turns examples into rows and drops unusable ones.
    Encoding is the expensive part: each rank encodes its own share only. ``column_names``: the
    columns of every row, if they are known before the first one.
    """

    examples: Callable[[], Iterator[Any]]
    encode: Callable[[list[Any]], Rows]
    column_names: Sequence[str] = ()


class StepBatches:
    """One rank's view of a data set as optimizer steps.

    A stream has a single endless epoch. Each of its global batches takes ``global_batch_size``
    examples; unusable ones make the batch smaller, on the rank whose share has them.

    Args:
        dataset: the rows, a table or a stream.
        global_batch_size: rows of one optimizer step, over all ranks and micro-batches.
        size: how the shares are cut into micro-batches, by their readers. With a token budget the
            shares of a table are balanced by tokens, for which every rank reads all rows.
        rank, world_size: the share of every global batch to take.
        seed: seeds the permutation, together with the epoch.
        shuffle: False keeps the order of the rows (evaluation: each row once, over all ranks).
        drop_last: drop a last global batch that is not full.
    """

    def __init__(
        self,
        dataset: Union[RowTable, RowStream],
        global_batch_size: int,
        size: MicroBatchSize,
        rank: int,
        world_size: int,
        seed: int,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        assert global_batch_size >= 1, global_batch_size
        assert 0 <= rank < world_size, (rank, world_size)
        self.dataset = dataset
        self.global_batch_size = global_batch_size
        self.size = size
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last

    def __len__(self) -> int:
        """Optimizer steps per epoch; a stream has no length."""
        assert not isinstance(self.dataset, RowStream), "a stream runs for --max_steps"
        full, rest = divmod(len(self.dataset), self.global_batch_size)
        return full + (rest > 0 and not self.drop_last)

    @property
    def num_rows(self) -> int | None:
        """Rows of the data set; None for a stream."""
        return None if isinstance(self.dataset, RowStream) else len(self.dataset)

    def epoch_of(self, step: int) -> int:
        """The epoch that optimizer step number ``step`` (from 0) belongs to."""
        return 0 if isinstance(self.dataset, RowStream) else step // max(1, len(self))

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Rows]:
        """This rank's rows of each optimizer step of an epoch; ``first_step`` > 0 resumes.

        Shares of a global batch differ by at most one row, unless they are balanced by tokens.
        """
        if isinstance(self.dataset, RowStream):
            yield from self._stream(self.dataset, first_step)
            return
        dataset = self.dataset
        num_rows = len(dataset)
        order = np.arange(num_rows)
        if self.shuffle:
            order = np.random.default_rng([self.seed, epoch]).permutation(num_rows)
        for step in range(first_step, len(self)):
            start = step * self.global_batch_size
            indices = order[start : start + self.global_batch_size]
            if self.size.tokens:
                rows = [dataset[i] for i in indices.tolist()]
                parts = spread([row_tokens(row).total for row in rows], self.world_size)
                yield [rows[i] for i in sorted(parts[self.rank])]
            else:
                share = _share(indices, self.rank, self.world_size)
                yield [dataset[i] for i in share.tolist()]

    def _stream(self, stream: RowStream, first_step: int) -> Iterator[Rows]:
        examples = stream.examples()
        for _ in islice(examples, first_step * self.global_batch_size):
            pass
        while True:
            step = list(islice(examples, self.global_batch_size))
            yield stream.encode(_share(step, self.rank, self.world_size))


class TokenizedPrompts(list):
    """A list of the prompts' token id lists, with parallel lists of where the ids come from.

    ``sources``: text or chat messages; ``texts``: the text, or the last user turn; each None if
    unknown. ``columns``: the other columns of the prompts' rows, name -> one value per prompt.
    """

    def __init__(
        self,
        ids: list[list[int]],
        sources: list[Any] | None = None,
        texts: list[str] | None = None,
        columns: dict[str, list[Any]] | None = None,
    ) -> None:
        super().__init__(ids)
        self.sources = sources
        self.texts = texts
        self.columns = columns or {}


@runtime_checkable
class ResumableIterator(Protocol):
    """An iterator with which a run resumes in its data.

    Attributes: ``position``, the number of items taken so far; assign it to seek.
    """

    position: int

    def __next__(self) -> Any: ...


def position_of(items: Iterator[Any] | None) -> int:
    """Items taken so far; 0 where that is not known, or there are none."""
    return items.position if isinstance(items, ResumableIterator) else 0


def seek(items: Iterator[Any] | None, position: int) -> None:
    """Continue after so many items, if ``items`` can."""
    if isinstance(items, ResumableIterator):
        items.position = position


class Endless(Iterator[Any]):
    """An endless `ResumableIterator`.

    Args:
        start_at: returns an iterator that skips the first n items.
    """

    def __init__(self, start_at: Callable[[int], Iterator[Any]]) -> None:
        self._start_at = start_at
        self._items: Iterator[Any] | None = None
        self._position = 0

    @property
    def position(self) -> int:
        return self._position

    @position.setter
    def position(self, position: int) -> None:
        self._position, self._items = position, None

    def __next__(self) -> Any:
        if self._items is None:
            self._items = self._start_at(self._position)
        item = next(self._items)
        self._position += 1
        return item


class PromptBatches:
    """Step 3's data loader: yields this rank's prompts of each rollout as `TokenizedPrompts`.

    Each pass is the next epoch; a stream continues where the last pass stopped. A last rollout that
    is not full is dropped, unless it is the only one.

    Args:
        dataset: rows of ``prompt_dataset``, a table or a stream.
        rollout_prompts: prompts of one rollout, over all ranks.
        rank, world_size, seed: as in ``StepBatches``.
    """

    def __init__(
        self,
        dataset: Union[RowTable, RowStream],
        rollout_prompts: int,
        rank: int,
        world_size: int,
        seed: int,
    ) -> None:
        self._place = (rank, world_size)
        self._columns = prompt_columns(dataset)
        self._epoch = 0
        self._rollouts = None
        drop_last = True
        if isinstance(dataset, RowStream):
            self._rollouts = _full_rollouts(dataset, rollout_prompts)
        else:
            drop_last = len(dataset) >= rollout_prompts
        size = MicroBatchSize(rollout_prompts)
        self._batches = StepBatches(
            dataset, rollout_prompts, size, rank, world_size, seed, drop_last=drop_last
        )

    def __len__(self) -> int:
        """Rollouts in an epoch."""
        return len(self._batches)

    @property
    def num_rows(self) -> int | None:
        """Rows of the data set; None for a stream."""
        return self._batches.num_rows

    def __iter__(self) -> Iterator[TokenizedPrompts]:
        if self._rollouts is not None:
            for rows in self._rollouts:
                yield prompts_of(_share(rows, *self._place), self._columns)
            return
        epoch, self._epoch = self._epoch, self._epoch + 1
        for rows in self._batches.epoch(epoch):
            yield prompts_of(rows, self._columns)

    def endless(self) -> Endless:
        """The rollouts of all epochs, one after the other."""
        return Endless(self._from)

    def _from(self, taken: int) -> Iterator[TokenizedPrompts]:
        batches = self._batches
        if not isinstance(batches.dataset, RowStream):
            for rows in _steps(batches, taken):
                yield prompts_of(rows, self._columns)
            return
        rollouts = _full_rollouts(batches.dataset, batches.global_batch_size)
        for rows in islice(rollouts, taken, None):
            yield prompts_of(_share(rows, *self._place), self._columns)


def prompts_of(rows: Rows, columns: Collection[str] | None = None) -> TokenizedPrompts:
    """Rows of ``prompt_dataset`` as prompts; ``sources`` and ``texts`` if all rows have one.

    ``columns``: see ``prompt_columns``; default: those of the first row.
    """
    if columns is None:
        columns = prompt_columns(rows)
    sources = [json.loads(row["prompt"]) for row in rows if "prompt" in row]
    texts = [row["prompt_text"] for row in rows if "prompt_text" in row]
    return TokenizedPrompts(
        [row["prompt_ids"] for row in rows],
        sources if len(sources) == len(rows) else None,
        texts if len(texts) == len(rows) else None,
        unpack(rows, sorted(columns)),
    )


def prompt_columns(dataset: Union[RowTable, RowStream]) -> set[str]:
    """Names of the columns that rows of ``prompt_dataset`` carry for reward functions: all columns
    of their source except the prompt.
    """
    if isinstance(dataset, RowStream):
        return unpacked_names(dataset.column_names)
    names = getattr(dataset, "column_names", None)
    if names is None:
        names = dataset[0] if len(dataset) else ()
    return unpacked_names(names)


def _share(rows: Any, rank: int, world_size: int) -> Any:
    """A rank's part of a global batch: contiguous, so that a row's number in the batch follows from
    its rank and its index there.
    """
    first, last = (len(rows) * r // world_size for r in (rank, rank + 1))
    return rows[first:last]


def _full_rollouts(stream: RowStream, rollout_prompts: int) -> Iterator[Rows]:
    """Every rollout of a stream. Each rank encodes all prompts: they are short, and one that is too
    long must not make a rollout smaller.
    """
    examples, rows = stream.examples(), []
    while True:
        rows += stream.encode(list(islice(examples, rollout_prompts)))
        while len(rows) >= rollout_prompts:
            yield rows[:rollout_prompts]
            rows = rows[rollout_prompts:]


def endless(batches: StepBatches) -> Endless:
    """This rank's rows of the optimizer steps of epoch 0, 1, 2, ..., endlessly."""
    return Endless(lambda taken: _steps(batches, taken))


def _steps(batches: StepBatches, taken: int) -> Iterator[Rows]:
    if isinstance(batches.dataset, RowStream):
        yield from batches.epoch(0, taken)
    epoch, first = divmod(taken, len(batches))
    while True:
        yield from batches.epoch(epoch, first)
        epoch, first = epoch + 1, 0
