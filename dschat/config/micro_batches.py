"""Flags that pack rows, and cut an optimizer step into micro-batches."""

from dataclasses import dataclass
from typing import Literal

from dschat.config.errors import require
from dschat.config.fields import AUTO, IntOrAuto, flag


@dataclass
class MicroBatchConfig:
    """Micro-batches.

    How forwards take a process's rows of an optimizer step; the update does not depend on it.
    """

    packing: Literal["auto", "on", "off"] = flag(
        "auto",
        "Train and score on token streams without padding, in which answers to one prompt share "
        "it; auto: pad where the model's family cannot, on: stop there.",
    )
    gradient_accumulation_steps: int = flag(
        1,
        "Micro-batches per optimizer step and process.",
        aliases=["--gradient_accumulation"],
        ge=1,
    )
    max_tokens_per_micro_batch: IntOrAuto = flag(
        0,
        "Balance the rows of an optimizer step over the processes by tokens, and cut them into "
        "micro-batches of at most N tokens; auto: as many as fit in memory. 0: into micro-"
        "batches of the batch size per device.",
        ge=0,
    )

    def validate_micro_batches(self, longest_row: int, flags: str) -> None:
        """``UserError`` where a micro-batch cannot hold the longest row, of ``flags`` tokens."""
        budget = self.max_tokens_per_micro_batch
        if budget == AUTO:
            return
        require(
            not 0 < int(budget) < longest_row,
            f"--max_tokens_per_micro_batch {budget} is less than one row can have: "
            f"{flags} = {longest_row}; raise it, or use auto",
        )
