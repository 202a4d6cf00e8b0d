"""Fits the batch of the settings to a number of nodes, in the largest micro-batches that fit."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from dschat.config import CommonConfig, RLHFConfig, SupervisedConfig, UserError
from dschat.config.fields import AUTO
from dschat.estimate.result import StepEstimate
from dschat.estimate.timing import StepTime, Timer

_LARGEST_ROWS = 128  # of a micro-batch
EstimateOn = Callable[[CommonConfig, int], StepEstimate]  # of a number of processes


@dataclass(frozen=True)
class Scaled:
    """A step on some nodes: what fits, and its time."""

    nodes: int
    config: CommonConfig
    time: StepTime

    @property
    def rows(self) -> int:
        """Rows of a micro-batch."""
        c = self.config
        if isinstance(c, RLHFConfig):
            return c.per_device_training_batch_size
        assert isinstance(c, SupervisedConfig)
        return c.per_device_train_batch_size


def scale(before: StepEstimate, nodes: int, estimate_on: EstimateOn, timer: Timer) -> Scaled | str:
    """``before``'s step on ``nodes`` with the largest micro-batch that fits; else the reason."""
    count = nodes * timer.per_node
    configs = list(same_batch(before.config, before.num_processes, count))
    if not configs:
        return f"{count} devices do not divide the batch"
    for config in configs:
        try:
            config.validate()
            estimate = estimate_on(config, count)
        except UserError as error:
            return str(error)
        if estimate.fits:
            return Scaled(nodes, config, timer.time(estimate))
    return "does not fit"


def same_batch(config: CommonConfig, old: int, count: int) -> Iterator[CommonConfig]:
    """``config`` on ``count`` processes with the batch it has on ``old`` ones, from the largest
    micro-batch down; none if the processes do not divide the batch.
    """
    if isinstance(config, RLHFConfig):
        prompts, rest = divmod(config.rollout_prompts(old), count)
        if rest or prompts % config.generation_batches:
            return
        prompts //= config.generation_batches
        config = replace(config, per_device_generation_batch_size=prompts)
        name, total = "per_device_training_batch_size", config.mini_batch_size(old)
    else:
        assert isinstance(config, SupervisedConfig)
        name, total = "per_device_train_batch_size", config.global_batch_size(old)
    each, rest = divmod(total, count)
    if rest:
        return
    budget = config.max_tokens_per_micro_batch
    if budget == AUTO or budget:  # cuts the step by tokens, whatever the rows
        yield _with(config, name, each, 1)
        return
    for rows in range(min(each, _LARGEST_ROWS), 0, -1):
        if each % rows == 0 and (rows & (rows - 1) == 0 or rows == each):
            yield _with(config, name, rows, each // rows)


def _with(config: CommonConfig, name: str, rows: int, times: int) -> CommonConfig:
    fields: dict[str, Any] = {name: rows, "gradient_accumulation_steps": times}
    return replace(config, **fields)
