"""Which rows make which optimizer step, and which of them are this rank's.

Comes in: any sequence of rows (a ``datasets.Dataset``, a list), the global batch size, and this
rank's place as two numbers. Goes out: for every optimizer step a list of micro-batches. Must not
know tensors or process groups: ranks agree because each computes the same permutation, not because
they talk.

Global batch k of epoch e is one set of rows, however it is cut: it depends on (seed, e, global
batch size) alone. So runs with other numbers of ranks or micro-batches, but the same global batch
size, take the same optimizer steps.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

Rows = list[Any]


class StepBatches:
    """A data set as optimizer steps, for one rank.

    Args:
        dataset: the rows; something with ``len`` and integer indexing.
        global_batch_size: rows of one optimizer step, over all ranks and micro-batches.
        micro_batch_size: most rows of a micro-batch.
        rank, world_size: which share of every global batch to take.
        seed: of the permutation, together with the epoch.
        shuffle: False keeps the order of the rows (evaluation: each row once, over all ranks).
        drop_last: leave out a last global batch that is not full.
    """

    def __init__(
        self,
        dataset: Sequence[Any],
        global_batch_size: int,
        micro_batch_size: int,
        rank: int,
        world_size: int,
        seed: int,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        assert global_batch_size >= 1, global_batch_size
        assert micro_batch_size >= 1, micro_batch_size
        assert 0 <= rank < world_size, (rank, world_size)
        self.dataset = dataset
        self.global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.shuffle = shuffle
        self.drop_last = drop_last

    def __len__(self) -> int:
        """Optimizer steps an epoch."""
        full, rest = divmod(len(self.dataset), self.global_batch_size)
        return full + (rest > 0 and not self.drop_last)

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[list[Rows]]:
        """The micro-batches of each optimizer step of an epoch, from ``first_step`` on (to resume).

        Every rank gets the same number of micro-batches in a step; where it has fewer rows than
        another, its last ones are short or empty. Ranks' shares of a global batch differ by at most
        one row.
        """
        num_rows = len(self.dataset)
        order = np.arange(num_rows)
        if self.shuffle:
            order = np.random.default_rng([self.seed, epoch]).permutation(num_rows)
        for step in range(first_step, len(self)):
            start = step * self.global_batch_size
            indices = order[start : start + self.global_batch_size]
            # Contiguous parts: a row's number in the global batch follows from its rank and place.
            first, last = (len(indices) * r // self.world_size for r in (self.rank, self.rank + 1))
            share = indices[first:last].tolist()
            largest_share = -(-len(indices) // self.world_size)
            num_micro_batches = -(-largest_share // self.micro_batch_size)
            starts = range(0, num_micro_batches * self.micro_batch_size, self.micro_batch_size)
            yield [self._rows(share[i : i + self.micro_batch_size]) for i in starts]

    def _rows(self, indices: list[int]) -> Rows:
        return [self.dataset[i] for i in indices]


class PromptBatches:
    """Step 3's data loader: every iteration yields this rank's prompts of one rollout, as id lists.

    Each pass over it is the next epoch. A last rollout that is not full is left out, unless it is
    the only one.

    Args:
        dataset: rows of ``prompt_dataset``.
        rollout_prompts: prompts of one rollout, over all ranks.
        rank, world_size, seed: as in ``StepBatches``.
    """

    def __init__(
        self, dataset: Sequence[Any], rollout_prompts: int, rank: int, world_size: int, seed: int
    ) -> None:
        drop_last = len(dataset) >= rollout_prompts
        self._batches = StepBatches(
            dataset, rollout_prompts, rollout_prompts, rank, world_size, seed, drop_last=drop_last
        )
        self._epoch = 0

    def __len__(self) -> int:
        """Rollouts in an epoch."""
        return len(self._batches)

    def __iter__(self) -> Iterator[list[list[int]]]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        for (rows,) in self._batches.epoch(epoch):
            yield [row["prompt_ids"] for row in rows]


def endless(batches: StepBatches) -> Iterator[list[Rows]]:
    """The optimizer steps of epoch 0, 1, 2, ... without end."""
    epoch = 0
    while True:
        yield from batches.epoch(epoch)
        epoch += 1
