"""Prints the hours and dollars of a step, and how they change with the number of nodes.

More nodes share the same batch: the sequences of an optimizer step and of a rollout stay those of
the settings, and the micro-batch is the largest power of two that the memory takes.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dschat.config import CommonConfig, RLHFConfig, SupervisedConfig, UserError
from dschat.config.fields import AUTO
from dschat.estimate import CostRequest, Request
from dschat.estimate.devices import DeviceSpeed, device_of, find_speed, measure_cpu
from dschat.estimate.result import StepEstimate
from dschat.estimate.timing import StepTime, Timer, bottleneck

_UNKNOWN = 1000  # steps, where the length of an epoch is not known
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


def find_device_speed(request: Request, cost: CostRequest) -> DeviceSpeed | None:
    """The device that ``--plan_device`` names, else this machine's; None if it is not known."""
    if cost.device:
        return find_speed(cost.device, request.processes_here)
    if request.device_memory_gib is not None:
        return None
    if not torch.cuda.is_available():
        return measure_cpu(request.processes_here)
    properties = torch.cuda.get_device_properties(0)
    name = device_of(properties.name, properties.total_memory)
    return find_speed(name) if name else None


def time_lines(estimate: StepEstimate, time: StepTime, cost: CostRequest) -> list[str]:
    """The phases of a step, and the hours and dollars of all its steps."""
    fleet, num_nodes = time.fleet, math.ceil(time.fleet.count / time.fleet.per_node)
    where = f"{fleet.count} x {fleet.device.name}"
    if num_nodes > 1:
        where += f" on {num_nodes} nodes"
    what = "an iteration" if isinstance(estimate.config, RLHFConfig) else "an optimizer step"
    lengths = f"{time.rows.count:,.0f} sequences of {time.rows.seq_len:,} tokens"
    lines = [f"  seconds of {what} ({lengths}) on {where}:"]
    lines += [f"    {p.name:<10}{_seconds(p.total_s):>10}  {p.bound}" for p in time.phases]
    lines.append(f"    {'total':<10}{_seconds(time.total_s):>10}")
    steps, known = num_steps(estimate.config, time, cost)
    hours = steps * time.total_s / 3600
    plural = "s" if steps > 1 else ""
    total = f"  {steps:,} step{plural}: {hours:.3g} h, {hours * fleet.count:.3g} device hours"
    if cost.price is not None:
        total += f", ${hours * fleet.count * cost.price:,.2f}"
    hint = "" if known else " (--plan_examples N: of an epoch of N examples)"
    return [*lines, total + hint]


def num_steps(config: CommonConfig, time: StepTime, cost: CostRequest) -> tuple[int, bool]:
    """Optimizer steps or iterations of the run, and whether that is known."""
    if config.max_steps:
        return config.max_steps, True
    if cost.examples is None:
        return _UNKNOWN, False
    a_step = time.rows.count / time.rows.samples / time.per_example
    return max(1, math.ceil(config.num_train_epochs * cost.examples / a_step)), True


def scaling_lines(
    before: StepEstimate, estimate_on: EstimateOn, timer: Timer, cost: CostRequest
) -> list[str]:
    """The step on every number of nodes, and which of them costs least."""
    if not cost.nodes:
        return []
    header = ("nodes", "devices", "micro-batch", "s a step", "speedup", "hours", "device hours")
    lines = ["  the same batch on other numbers of nodes:", _row((*header, *_price(cost, None)))]
    points = []
    for nodes in sorted(set(cost.nodes)):
        point = scale(before, nodes, estimate_on, timer)
        if isinstance(point, str):
            lines.append(f"    {nodes:>5}  {point}")
            continue
        points.append(point)
        steps, _ = num_steps(before.config, point.time, cost)
        hours = steps * point.time.total_s / 3600
        cells = (
            f"{nodes}",
            f"{point.time.fleet.count}",
            f"{point.rows}",
            _seconds(point.time.total_s),
            f"{points[0].time.total_s / point.time.total_s:.2f}",
            f"{hours:.3g}",
            f"{hours * point.time.fleet.count:.3g}",
        )
        lines.append(_row((*cells, *_price(cost, hours * point.time.fleet.count))))
    if points:
        lines += _best(points)
    return lines


def _best(points: Sequence[Scaled]) -> Iterator[str]:
    cheapest = min(points, key=lambda p: p.time.total_s * p.time.fleet.count)
    fastest = min(points, key=lambda p: p.time.total_s)
    for word, point in (("cheapest", cheapest), ("fastest", fastest)):
        fleet = point.time.fleet
        yield (
            f"  {word}: {fleet.count} devices, micro-batches of {point.rows}; longest phase: "
            f"{bottleneck(point.time.phases)}"
        )


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


def _price(cost: CostRequest, device_hours: float | None) -> tuple[str, ...]:
    """The last cell of a row, or of the header."""
    if cost.price is None:
        return ()
    return ("dollars" if device_hours is None else f"{device_hours * cost.price:,.2f}",)


def _row(cells: Sequence[str]) -> str:
    return "    " + f"{cells[0]:>5}" + "".join(f"{cell:>13}" for cell in cells[1:])


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g}" if seconds < 1000 else f"{seconds:.0f}"
