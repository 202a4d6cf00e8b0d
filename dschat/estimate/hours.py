"""Adds up the seconds of a step, its hours and dollars, and compares numbers of nodes.

Every row counts at its mean lengths: those of ``--plan_tokens``, else the longest ones.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dschat.config import CommonConfig, RewardConfig, RLHFConfig, SupervisedConfig, UserError
from dschat.estimate import PlanRequest
from dschat.estimate.memory import Estimator, Learner, StepEstimate, token_budget
from dschat.estimate.models import MODEL_ERRORS
from dschat.estimate.seconds import HF_LOOP, Fleet, Phase, Rows, cached_bytes

_CHECKED_SHARE = 1 / 8  # of the answers, that --old_logprobs auto recomputes (`rlhf.forwards`)
_LARGEST_ROWS = 128  # of a micro-batch
_UNKNOWN = 1000  # steps, where the length of an epoch is not known


@dataclass(frozen=True)
class StepTime:
    """The phases of one optimizer step (step 3: one iteration), of ``rows`` over all devices.

    Attributes:
        micro_batch: its rows.
        num_steps: of the run; None: the length of an epoch is not known.
    """

    fleet: Fleet
    rows: Rows
    micro_batch: int
    num_steps: int | None
    phases: Sequence[Phase]

    @property
    def total_s(self) -> float:
        return sum(phase.total_s for phase in self.phases)

    def costs(self, price: float | None) -> list[str]:
        """Hours, device hours and, with a price, dollars of all steps."""
        hours = (self.num_steps or _UNKNOWN) * self.total_s / 3600
        device_hours = hours * self.fleet.count
        dollars = [] if price is None else [f"{device_hours * price:,.2f}"]
        return [f"{hours:.3g}", f"{device_hours:.3g}", *dollars]


def step_time(estimate: StepEstimate, request: PlanRequest) -> StepTime:
    """The time of ``estimate``'s step on a device of known speed.

    Raises:
        UserError: the FLOPs of a model are not known.
    """
    c, count, device = estimate.config, estimate.num_processes, estimate.device
    assert device.speed is not None
    fleet = Fleet(device.speed, count, min(device.processes_here, count))
    if isinstance(c, RLHFConfig):
        longest = c.max_prompt_seq_len, c.max_answer_seq_len
        prompt, answer = map(min, zip(request.tokens or longest, longest, strict=True))
        rows = Rows(c.rollout_samples(count), prompt, answer, c.num_samples_per_prompt)
        if estimate.rollout and not estimate.rollout.in_engine:
            fleet = replace(fleet, shares=HF_LOOP)
        parts, micro_batch = _rlhf(fleet, estimate, c, rows), c.per_device_training_batch_size
        examples = c.rollout_prompts(count)
    else:
        assert isinstance(c, SupervisedConfig)
        examples, micro_batch = c.global_batch_size(count), c.per_device_train_batch_size
        seq_len = min(c.max_seq_len, sum(request.tokens or (c.max_seq_len,)))
        rows = Rows(examples * (2 if isinstance(c, RewardConfig) else 1), seq_len, 0)
        parts = _supervised(fleet, estimate, c, rows)
    num_steps = c.max_steps or None
    if num_steps is None and request.examples is not None:
        num_steps = max(1, math.ceil(c.num_train_epochs * request.examples / examples))
    phases: dict[str, Phase] = {}
    for part in parts:  # of one name for each model
        phases[part.name] = part + phases.get(part.name, Phase(part.name))
    done = [phase for phase in phases.values() if phase.total_s]
    return StepTime(fleet, rows, micro_batch, num_steps, done)


def _supervised(
    fleet: Fleet, estimate: StepEstimate, c: SupervisedConfig, rows: Rows
) -> Iterator[Phase]:
    model = estimate.present[0]
    batches = _batches(c, rows, fleet.count, c.gradient_accumulation_steps)
    if isinstance(c, RewardConfig) and c.trains_policy and not c.precompute_ref_logprobs:
        yield fleet.score(estimate.present[-1], rows, batches, "reference")
    yield fleet.train(model, rows, batches)
    yield fleet.update(model, 1)


def _rlhf(fleet: Fleet, estimate: StepEstimate, c: RLHFConfig, rows: Rows) -> Iterator[Phase]:
    """Generation; a scoring pass of every model, the actor's as ``--old_logprobs`` says; the
    optimizer steps of actor and critic over all epochs.
    """
    actor, *others = estimate.present
    rollout, tp_size = estimate.rollout, c.inference_tp_size
    assert rollout is not None
    if rollout.weights:
        yield fleet.refresh(actor, tp_size)
    yield fleet.prefill(actor, rows, tp_size)
    # As many sequences at once as the flags and the cache take.
    room = cached_bytes(actor, rows)
    cached = rollout.cache * tp_size / room if room else math.inf
    yield fleet.decode(actor, rows, min(c.max_num_seqs, cached), tp_size)

    checked = {"recompute": 1.0, "rollout": 0.0, "auto": _CHECKED_SHARE}[c.old_logprobs]
    passes = [(actor, checked), *((model, 1.0) for model in others)]
    if c.needs_reference and "reference" not in [model.name for model in others]:
        passes.append((actor, 1.0))  # without its adapters
    for model, share in passes:
        read = replace(rows, count=share * rows.count)
        by_rows = math.ceil(read.count / fleet.count / c.per_device_training_batch_size)
        yield fleet.score(model, read, _batches(c, read, fleet.count, by_rows))

    steps = c.ppo_epochs * c.num_mini_batches
    mini_batch = replace(rows, count=c.mini_batch_size(fleet.count))
    batches = steps * _batches(c, mini_batch, fleet.count, c.gradient_accumulation_steps)
    for model in [model for model in estimate.present if isinstance(model, Learner)]:
        several = 2 if model is actor and c.unsupervised_dataset_name else 1  # pretraining text
        trained = replace(rows, count=several * c.ppo_epochs * rows.count)
        yield fleet.train(model, trained, several * batches)
        yield fleet.update(model, steps)


def _batches(c: RLHFConfig | SupervisedConfig, rows: Rows, count: int, by_rows: int) -> int:
    """Micro-batches of ``rows`` on one of ``count`` devices: by tokens, or ``by_rows``."""
    tokens = token_budget(c)
    return math.ceil(rows.count * rows.seq_len / count / tokens) if tokens else by_rows


# -- the report ------------------------------------------------------------------------------------


def time_lines(estimate: StepEstimate, request: PlanRequest, estimator: Estimator) -> Iterator[str]:
    """The phases of a step; the hours and dollars of all its steps; on other numbers of nodes."""
    if estimate.device.speed is None:
        yield "  memory only; for hours and dollars name a GPU with --plan_device"
        return
    try:
        what = "an iteration" if estimate.rollout else "an optimizer step"
        yield from _step_lines(step_time(estimate, request), what, request.price)
        yield from node_lines(estimate, request, estimator)
    except MODEL_ERRORS as error:
        yield f"  no times: {error}"


def _step_lines(time: StepTime, what: str, price: float | None) -> Iterator[str]:
    fleet, rows = time.fleet, time.rows
    where = f"{fleet.count} x {fleet.device.name}"
    if fleet.count > fleet.per_node:
        where += f" on {math.ceil(fleet.count / fleet.per_node)} nodes"
    lengths = f"{rows.count:,.0f} sequences of {rows.seq_len:,} tokens"
    yield f"  seconds of {what} ({lengths}) on {where}:"
    for phase in time.phases:
        yield f"    {phase.name:<10}{_seconds(phase.total_s):>10}  {phase.bound}"
    yield f"    {'total':<10}{_seconds(time.total_s):>10}"
    steps, (hours, device_hours, *dollars) = time.num_steps or _UNKNOWN, time.costs(price)
    text = f"  {steps:,} step{'s' * (steps > 1)}: {hours} h, {device_hours} device hours"
    text += "".join(f", ${number}" for number in dollars)
    yield text if time.num_steps else f"{text} (--plan_examples N: of an epoch of N examples)"


def node_lines(before: StepEstimate, request: PlanRequest, estimator: Estimator) -> Iterator[str]:
    """The step on every number of nodes, as a table."""
    if not request.nodes:
        return
    yield "  the same batch on other numbers of nodes:"
    header = ("nodes", "devices", "micro-batch", "s a step", "speedup", "hours", "device hours")
    yield _row(*header, *["dollars"][: request.price is not None], " longest phase")
    first = None
    for nodes in sorted(set(request.nodes)):
        time = on_nodes(before, nodes, request, estimator)
        if isinstance(time, str):
            yield f"    {nodes:>5}  {time}"
            continue
        first = first or time.total_s
        speed = _seconds(time.total_s), f"{first / time.total_s:.2f}", *time.costs(request.price)
        longest = max(time.phases, key=lambda phase: phase.total_s).name
        yield _row(nodes, time.fleet.count, time.micro_batch, *speed, f" {longest:>13}")


def on_nodes(
    before: StepEstimate, nodes: int, request: PlanRequest, estimator: Estimator
) -> StepTime | str:
    """``before``'s step on ``nodes`` with the largest micro-batch that fits; else the reason."""
    count = nodes * request.processes_here
    reason = f"{count} devices do not divide the batch"
    for config in same_batch(before.config, before.num_processes, count):
        try:
            config.validate()
            estimate = estimator(config, count)
        except UserError as error:
            return str(error)
        if estimate.fits:
            return step_time(estimate, request)
        reason = "does not fit"
    return reason


def same_batch(config: CommonConfig, old: int, count: int) -> Iterator[CommonConfig]:
    """``config`` on ``count`` processes with the batch it has on ``old`` ones, from the largest
    micro-batch down; none if the processes do not divide the batch.
    """
    fields: dict[str, Any] = {}
    if isinstance(config, RLHFConfig):
        prompts, rest = divmod(config.rollout_prompts(old), count)
        if rest or prompts % config.generation_batches:
            return
        fields["per_device_generation_batch_size"] = prompts // config.generation_batches
        name, total = "per_device_training_batch_size", config.mini_batch_size(old)
    else:
        assert isinstance(config, SupervisedConfig)
        name, total = "per_device_train_batch_size", config.global_batch_size(old)
    each, rest = divmod(total, count)
    if rest:
        return
    sizes = range(min(each, _LARGEST_ROWS), 0, -1)
    if config.max_tokens_per_micro_batch:  # cuts the step by tokens, whatever the rows
        sizes = range(each, each - 1, -1)
    for rows in sizes:
        if each % rows == 0 and (rows & (rows - 1) == 0 or rows == each):
            fields |= {name: rows, "gradient_accumulation_steps": each // rows}
            yield replace(config, **fields)


def _row(*cells: object) -> str:
    return f"    {cells[0]:>5}" + "".join(f"{cell:>13}" for cell in cells[1:])


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g}" if seconds < 1000 else f"{seconds:.0f}"
