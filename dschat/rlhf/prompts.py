"""Takes prompts in any form in which a caller gives them, and from a queue of all ranks."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import compress, count
from typing import Any

from torch import Tensor

import dschat.distributed as dist
from dschat.config import UserError
from dschat.data.batches import PromptTable, position_of, seek
from dschat.inference.protocol import prompt_problem
from dschat.rlhf.experience import Experience
from dschat.rlhf.prompt_sampling import AdaptivePrompts

PromptBatch = PromptTable | list[list[int]] | Mapping[str, Tensor | list[list[int]]]


def prompt_table(batch: PromptBatch, columns: Mapping[str, Any] | None = None) -> PromptTable:
    """Any form of prompt batch as a table, without padding; ``UserError`` for another type.
    ``columns``: further ones, each a list, array or tensor of one value per prompt.
    """
    table = _table(batch)
    for name, values in (columns or {}).items():
        table.columns[name] = values.tolist() if hasattr(values, "tolist") else list(values)
        if (count := len(table.columns[name])) != len(table):
            raise UserError(f"columns: {name} has {count} values for {len(table)} prompts")
    return table


def _table(batch: PromptBatch) -> PromptTable:
    if isinstance(batch, PromptTable):
        return replace(batch, ids=_checked(batch.ids), columns=dict(batch.columns))
    if not isinstance(batch, Mapping):
        return PromptTable(_checked(batch))
    if "input_ids" not in batch:
        raise UserError(f"a prompt batch needs input_ids; it has {', '.join(map(str, batch))}")
    rows = _checked(batch["input_ids"])
    if (mask := batch.get("attention_mask")) is not None:
        masks = _checked(mask)
        if list(map(len, masks)) != list(map(len, rows)):
            raise UserError("a prompt batch's attention_mask has another shape than its input_ids")
        rows = _checked([list(compress(row, keep)) for row, keep in zip(rows, masks, strict=True)])
    return PromptTable(rows)


class PromptQueue:
    """Prompts for rollouts that take more than a batch of them, for the whole run.

    From ``batches``. Without it, or once it is exhausted on any rank, the prompts that the
    caller falls back on.
    """

    def __init__(self, batches: Iterator[PromptBatch] | None = None) -> None:
        self._batches = batches
        self._left = PromptTable()  # of all ranks, drawn and not yet taken

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state that the next rollout depends on, the same on all ranks."""
        state = {"left": vars(self._left), "taken": position_of(self._batches)}
        if isinstance(self._batches, AdaptivePrompts):
            state["adaptive"] = self._batches.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._left = PromptTable(**state["left"])
        seek(self._batches, state["taken"])
        if isinstance(self._batches, AdaptivePrompts) and "adaptive" in state:
            self._batches.load_state_dict(state["adaptive"])

    def observe(self, e: Experience, clip: float | None) -> dict[str, float]:
        """Collective. See `AdaptivePrompts.observe`; does nothing for other prompts."""
        if not isinstance(self._batches, AdaptivePrompts):
            return {}
        return self._batches.observe(e, clip)

    def take(self, size: int, fallback: PromptTable) -> PromptTable:
        """Collective. This rank's share of the next ``size`` prompts, whose order does not depend
        on the number of ranks.
        """
        while len(self._left.ids) < size:
            batch = None if self._batches is None else next(self._batches, None)
            prompts = fallback if batch is None else prompt_table(batch)
            for of_rank, is_exhausted in dist.gather_objects((prompts, batch is None)):
                self._left = self._left.concat(of_rank)
                if is_exhausted:  # on one rank, therefore on all
                    self._batches = None
        rows = list(range(len(self._left.ids)))
        taken, self._left = self._left.pick(rows[:size]), self._left.pick(rows[size:])
        return taken.pick(dist.my_share(rows[:size]))


def _checked(rows: Iterable[Any]) -> list[list[int]]:
    prompts = [ids.tolist() if isinstance(ids, Tensor) else ids for ids in rows]
    for problem in filter(None, map(prompt_problem, count(), prompts)):
        raise UserError(problem)
    return [list(map(int, prompt)) for prompt in prompts]
