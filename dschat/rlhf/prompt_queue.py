"""Prompts for rollouts that take more than a batch of them: a queue that lasts for the run."""

from collections.abc import Iterator
from typing import Any

import dschat.distributed as dist
from dschat.data.batches import position_of, seek
from dschat.rlhf.prompt_table import PromptBatch, PromptTable


class PromptQueue:
    """Prompts of ``batches``. Without it, or once it is exhausted on any rank, the prompts that the
    caller falls back on.
    """

    def __init__(self, batches: Iterator[PromptBatch] | None = None) -> None:
        self._batches = batches
        self._left = PromptTable()  # of all ranks, drawn and not yet taken

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state that the next rollout depends on, the same on all ranks."""
        return {"left": vars(self._left), "taken": position_of(self._batches)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._left = PromptTable(**state["left"])
        seek(self._batches, state["taken"])

    def take(self, size: int, fallback: PromptTable) -> PromptTable:
        """Collective. This rank's share of the next ``size`` prompts, whose order does not depend
        on the number of ranks.
        """
        while len(self._left.ids) < size:
            batch = None if self._batches is None else next(self._batches, None)
            prompts = fallback if batch is None else PromptTable.of(batch)
            for of_rank, is_exhausted in dist.gather_objects((prompts, batch is None)):
                self._left = self._left.concat(of_rank)
                if is_exhausted:  # on one rank, therefore on all
                    self._batches = None
        rows = list(range(len(self._left.ids)))
        taken, self._left = self._left.pick(rows[:size]), self._left.pick(rows[size:])
        return taken.pick(dist.my_share(rows[:size]))
