"""Prints the hours and dollars of a step, and how they change with nodes."""

import math
from collections.abc import Iterator, Sequence

import torch

import dschat.distributed as dist
from dschat.config import CommonConfig, RLHFConfig
from dschat.estimate import CostRequest, Request
from dschat.estimate.batches import EstimateOn, Scaled, scale
from dschat.estimate.devices import DeviceSpeed, device_of, find_speed
from dschat.estimate.result import StepEstimate
from dschat.estimate.timing import StepTime, Timer, bottleneck

_UNKNOWN = 1000  # steps, where the length of an epoch is not known


def find_device_speed(request: Request) -> DeviceSpeed | None:
    """The GPU that ``--plan_device`` names, else this machine's; None if there is none, or its
    speed is not known.
    """
    if request.device_name:
        return find_speed(request.device_name)
    if request.device_memory_gib is not None or not dist.has_gpu():
        return None
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


def _price(cost: CostRequest, device_hours: float | None) -> tuple[str, ...]:
    """The last cell of a row, or of the header."""
    if cost.price is None:
        return ()
    return ("dollars" if device_hours is None else f"{device_hours * cost.price:,.2f}",)


def _row(cells: Sequence[str]) -> str:
    return "    " + f"{cells[0]:>5}" + "".join(f"{cell:>13}" for cell in cells[1:])


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g}" if seconds < 1000 else f"{seconds:.0f}"
