"""Adds up the seconds of a step, its hours and dollars.

Every row counts at its mean lengths: ``--plan_tokens``, else the longest.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from dschat.config import RewardConfig, RLHFConfig, SupervisedConfig
from dschat.estimate import PlanRequest
from dschat.estimate.memory import Learner, StepEstimate, token_budget
from dschat.estimate.models import MODEL_ERRORS
from dschat.estimate.seconds import HF_LOOP, Fleet, Rows, cached_bytes

_CHECKED_SHARE = 1 / 8  # of the answers, that --old_logprobs auto recomputes (`rlhf.forwards`)
_UNKNOWN = 1000  # steps, where the length of an epoch is not known


@dataclass(frozen=True)
class StepTime:
    """One optimizer step (step 3: one iteration), of ``rows`` over all devices."""

    fleet: Fleet
    rows: Rows
    num_steps: int | None  # of the run; None: the length of an epoch is not known
    seconds: Mapping[str, float]  # by phase

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())


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
        parts, examples = _rlhf(fleet, estimate, c, rows), c.rollout_prompts(count)
    else:
        assert isinstance(c, SupervisedConfig)
        examples = c.global_batch_size(count)
        seq_len = min(c.max_seq_len, sum(request.tokens or (c.max_seq_len,)))
        rows = Rows(examples * (2 if isinstance(c, RewardConfig) else 1), seq_len, 0)
        parts = _supervised(fleet, estimate, c, rows)
    num_steps = c.max_steps or None
    if num_steps is None and request.examples is not None:
        num_steps = max(1, math.ceil(c.num_train_epochs * request.examples / examples))
    seconds: dict[str, float] = {}
    for name, part_s in parts:  # of one name for each model
        seconds[name] = seconds.get(name, 0.0) + part_s
    return StepTime(fleet, rows, num_steps, {name: s for name, s in seconds.items() if s})


def _supervised(
    fleet: Fleet, estimate: StepEstimate, c: SupervisedConfig, rows: Rows
) -> Iterator[tuple[str, float]]:
    model = estimate.present[0]
    batches = _batches(c, rows, fleet.count, c.gradient_accumulation_steps)
    if isinstance(c, RewardConfig) and c.trains_policy and not c.precompute_ref_logprobs:
        yield "reference", fleet.score(estimate.present[-1], rows, batches)
    yield "train", fleet.train(model, rows, batches)
    yield "update", fleet.update(model, 1)


def _rlhf(
    fleet: Fleet, estimate: StepEstimate, c: RLHFConfig, rows: Rows
) -> Iterator[tuple[str, float]]:
    """Generation; a scoring pass of every model; the optimizer steps of actor and critic."""
    actor, *others = estimate.present
    rollout, tp_size = estimate.rollout, c.inference_tp_size
    assert rollout is not None
    if rollout.weights:
        yield "refresh", fleet.refresh(actor, tp_size)
    yield "prefill", fleet.prefill(actor, rows, tp_size)
    # As many sequences at once as the flags and the cache take.
    room = cached_bytes(actor, rows)
    cached = rollout.cache * tp_size / room if room else math.inf
    yield "decode", fleet.decode(actor, rows, min(c.max_num_seqs, cached), tp_size)

    checked = {"recompute": 1.0, "rollout": 0.0, "auto": _CHECKED_SHARE}[c.old_logprobs]
    passes = [(actor, checked), *((model, 1.0) for model in others)]
    if c.needs_reference and "reference" not in [model.name for model in others]:
        passes.append((actor, 1.0))  # without its adapters
    for model, share in passes:
        read = replace(rows, count=share * rows.count)
        by_rows = math.ceil(read.count / fleet.count / c.per_device_training_batch_size)
        yield "score", fleet.score(model, read, _batches(c, read, fleet.count, by_rows))

    steps = c.ppo_epochs * c.num_mini_batches
    mini_batch = replace(rows, count=c.mini_batch_size(fleet.count))
    batches = steps * _batches(c, mini_batch, fleet.count, c.gradient_accumulation_steps)
    for model in [model for model in estimate.present if isinstance(model, Learner)]:
        several = 2 if model is actor and c.unsupervised_dataset_name else 1  # pretraining text
        trained = replace(rows, count=several * c.ppo_epochs * rows.count)
        yield "train", fleet.train(model, trained, several * batches)
        yield "update", fleet.update(model, steps)


def _batches(c: RLHFConfig | SupervisedConfig, rows: Rows, count: int, by_rows: int) -> int:
    """Micro-batches of ``rows`` on one of ``count`` devices: by tokens, or ``by_rows``."""
    tokens = token_budget(c)
    return math.ceil(rows.count * rows.seq_len / count / tokens) if tokens else by_rows


def time_lines(estimate: StepEstimate, request: PlanRequest) -> Iterator[str]:
    """The seconds of a step by phase; the hours and dollars of all its steps."""
    if estimate.device.speed is None:
        yield "  memory only; for hours and dollars name a GPU with --plan_device"
        return
    try:
        time = step_time(estimate, request)
    except MODEL_ERRORS as error:
        yield f"  no times: {error}"
        return
    fleet, rows = time.fleet, time.rows
    what = "an iteration" if estimate.rollout else "an optimizer step"
    where = f"{fleet.count} x {fleet.device.name}"
    if fleet.count > fleet.per_node:
        where += f" on {math.ceil(fleet.count / fleet.per_node)} nodes"
    lengths = f"{rows.count:,.0f} sequences of {rows.seq_len:,} tokens"
    yield f"  seconds of {what} ({lengths}) on {where}:"
    for name, seconds in {**time.seconds, "total": time.total_s}.items():
        yield f"    {name:<10}{seconds:>10{'.3g' if seconds < 1000 else '.0f'}}"
    steps = time.num_steps or _UNKNOWN
    hours = steps * time.total_s / 3600
    device_hours = hours * fleet.count
    text = f"  {steps:,} step{'s' * (steps > 1)}: {hours:.3g} h, {device_hours:.3g} device hours"
    text += "" if request.price is None else f", ${device_hours * request.price:,.2f}"
    yield text if time.num_steps else f"{text} (--plan_examples N: of an epoch of N examples)"
