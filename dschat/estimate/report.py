"""Estimates every step of a request: the tables of ``--plan`` and the lines of the log, and changes
for a step that does not fit.

Suggested are at most three changes, each with its flags and the bytes it saves on top of the
changes before it, by an estimate with them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dschat.config import CommonConfig, RewardConfig, RLHFConfig, SupervisedConfig, UserError
from dschat.config.errors import first_line
from dschat.config.fields import AUTO
from dschat.estimate import PlanRequest
from dschat.estimate.devices import GIB, find_device
from dschat.estimate.hours import time_lines
from dschat.estimate.memory import Estimator, StepEstimate, SupervisedEstimator
from dschat.estimate.models import MODEL_ERRORS, Models
from dschat.estimate.rlhf import RLHFEstimator


@dataclass(frozen=True)
class Change:
    """Fields to set together. ``cost``: 1 nearly free, 2 slower, 4 changes the result."""

    fields: dict[str, Any]
    cost: float

    def flags(self, number: int) -> str:
        """The flags of train.py for step ``number``."""
        return " ".join(f"--step{number}.{_flag(k, v)}" for k, v in self.fields.items())


@dataclass(frozen=True)
class Advice:
    """A change, the bytes by which it lowers the peak, and the estimate with it."""

    change: Change
    saved: int
    after: StepEstimate


def advise(before: StepEstimate, estimator: Estimator, most: int = 3) -> list[Advice]:
    """At most ``most`` changes, until the step fits; each is the one with most savings per cost.

    Savings count up to the excess, so that a cheap change that suffices comes before a costly one
    that saves more.
    """
    advice: list[Advice] = []
    while not before.fits and len(advice) < most:
        tried = [(change, _with(before, change, estimator)) for change in _changes(before)]
        helping = [
            (change, after) for change, after in tried if after and after.excess < before.excess
        ]
        if not helping:
            break
        change, after = max(helping, key=lambda t: (before.excess - t[1].excess) / t[0].cost)
        advice.append(Advice(change, before.peak.total - after.peak.total, after))
        before = after
    return advice


def _with(before: StepEstimate, change: Change, estimator: Estimator) -> StepEstimate | None:
    """The estimate with ``change``; None if the flags are incompatible."""
    try:
        config = replace(before.config, **change.fields)
        config.validate()
        return estimator(config, before.num_processes)
    except UserError:
        return None


def _changes(estimate: StepEstimate) -> Iterator[Change]:
    """Every change that may help and is not set yet."""
    several, config = estimate.num_processes > 1, estimate.config
    if isinstance(config, SupervisedConfig):
        yield from _halves(config, "per_device_eval_batch_size")
        yield from _smaller_micro_batch(config, "per_device_train_batch_size")
        yield from _of_model(config, "", several)
        yield from _halves(config, "max_seq_len", cost=4)
    if isinstance(config, RewardConfig) and config.loads_reference:
        yield from _off(config, "precompute_ref_logprobs", 1.25)
        yield from _offload(config, "reference", 1.5)
    if isinstance(config, RLHFConfig):
        yield from _halves(config, "eval_batch_size")
        yield from _smaller_micro_batch(config, "per_device_training_batch_size")
        yield from _of_rollout(config, estimate.num_processes)
        yield from _of_model(config, "actor_", several)
        if config.has_critic:
            yield from _of_model(config, "critic_", several)
        if config.needs_reference:
            yield from _offload(config, "reference", 1.5)
        if config.reward_model_name_or_path:
            yield from _offload(config, "reward", 1.5)
            yield from _in_4_bits(config, "reward")
        if config.has_teacher:
            yield from _offload(config, "teacher", 1.5)
            yield from _in_4_bits(config, "teacher")
        if config.enable_ema:
            yield Change({"enable_ema": False}, 3)
        yield from _halves(config, "max_answer_seq_len", cost=4)
    size = 2 * config.sequence_parallel_size
    if estimate.num_processes % size == 0 and config.packing != "off":
        yield Change({"sequence_parallel_size": size}, 1.25)
    if estimate.device.on_gpu:
        yield from _offload(config, "optimizer", 2)
        yield from _offload(config, "activations", 1.5)
        if config.training_dtype == "fp32":
            yield Change({"dtype": "bf16"}, 1.5)


def _of_model(config: CommonConfig, prefix: str, several: bool) -> Iterator[Change]:
    yield from _off(config, f"{prefix}gradient_checkpointing", 1.5)
    stage = getattr(config, f"{prefix}zero_stage")
    for other in (2, 3):
        if several and other > stage:
            yield Change({f"{prefix}zero_stage": other}, 1 if other == 2 else 1.5)
    if not config.offloads("params"):
        parts = [*dict.fromkeys([*(config.offload or ()), "auto"])]
        yield Change({f"{prefix}zero_stage": 3, "offload": parts}, 3)
    if getattr(config, f"{prefix}lora_dim"):
        yield from _in_4_bits(config, prefix.removesuffix("_") or "model")
    else:
        yield Change({f"{prefix}lora_dim": 64}, 4)


def _of_rollout(config: RLHFConfig, num_processes: int) -> Iterator[Change]:
    yield from _halves(config, "max_num_seqs")
    yield from _off(config, "release_inference_cache", 1)
    yield from _off(config, "unpin_actor_parameters", 1)
    yield from _offload(config, "rollout", 1.5)
    if config.rollout_layout != "zero_copy":
        yield Change({"rollout_layout": "zero_copy"}, 1.5)
    size = 2 * config.inference_tp_size
    if num_processes % size == 0:
        yield Change({"inference_tp_size": size}, 1.5)


def _off(config: CommonConfig, name: str, cost: float) -> Iterator[Change]:
    """Switch on a flag that is off."""
    if not getattr(config, name):
        yield Change({name: True}, cost)


def _offload(config: CommonConfig, part: str, cost: float) -> Iterator[Change]:
    """Add ``part`` to what is in CPU memory."""
    if not config.offloads(part):
        yield Change({"offload": [*(config.offload or ()), part]}, cost)


def _in_4_bits(config: CommonConfig, model: str) -> Iterator[Change]:
    if not config.weight_bits(model):
        yield Change({"load_in_4bit": [*(config.load_in_4bit or ()), model]}, 3)


def _halves(config: CommonConfig, name: str, cost: float = 1) -> Iterator[Change]:
    value = getattr(config, name)
    if value > 1:
        yield Change({name: value // 2}, cost)


def _smaller_micro_batch(config: CommonConfig, name: str) -> Iterator[Change]:
    """A half and a quarter of the micro-batch, with the same batch per optimizer step."""
    if config.max_tokens_per_micro_batch:
        if config.max_tokens_per_micro_batch != AUTO:  # which tries what fits by itself
            yield from _halves(config, "max_tokens_per_micro_batch")
        return
    size, times = getattr(config, name), config.gradient_accumulation_steps
    for cut in (2, 4):
        if size % cut == 0:
            fields = {name: size // cut, "gradient_accumulation_steps": times * cut}
            yield Change(fields, 1 if cut == 2 else 1.25)


def _flag(name: str, value: Any) -> str:
    if value is True:
        return name
    shown = " ".join(value) if isinstance(value, list) else value
    return f"no_{name}" if value is False else f"{name} {shown}"


_MIB = 2**20
_TITLES = {1: "supervised fine-tuning", 2: "reward model", 3: "RLHF"}
_ORDER = (
    *("model weights", "actor weights", "critic weights", "reference weights", "reward weights"),
    "teacher weights",
    *("gradients", "optimizer states", "moving average", "rollout copy", "KV cache"),
    *("activations", "kept by malloc", "logits", "buffers", "file being written", "libraries"),
)


def tables(request: PlanRequest) -> str:
    """The estimate of every step as a table, with its time and dollars on a GPU.

    Raises:
        UserError: a model without a readable configuration, or settings that DeepSpeed rejects.
    """
    estimator, texts = make_estimator(request), []
    for number in sorted(request.steps):
        estimate = estimator(request.config(number), request.num_processes)
        lines = [table(estimate, advise(estimate, estimator))]
        texts.append("\n".join([*lines, *time_lines(estimate, request, estimator)]))
    return "\n\n".join(texts)


def log_lines(request: PlanRequest) -> Iterator[str]:
    """One line per step: its estimate, or why there is none."""
    estimator = make_estimator(request)
    for number in sorted(request.steps):
        try:
            estimate = estimator(request.config(number), request.num_processes)
            yield line(estimate, advise(estimate, estimator, most=1))
        except UserError as error:
            yield f"no plan: step {number}: {error}"


def make_estimator(request: PlanRequest) -> Estimator:
    """A function from a step's configuration, and a number of processes, to its estimate on the
    request's device.
    """
    device, models = find_device(request), Models(request.made_from)

    def estimate(config: CommonConfig, num_processes: int) -> StepEstimate:
        try:
            if isinstance(config, RLHFConfig):
                return RLHFEstimator(models, device, num_processes, config).estimate()
            assert isinstance(config, SupervisedConfig)
            return SupervisedEstimator(models, device, num_processes, config).estimate()
        except UserError:
            raise
        except MODEL_ERRORS as error:
            raise UserError(
                f"a model of this step cannot be planned: {first_line(error)}"
            ) from error

    return estimate


def title_of(estimate: StepEstimate) -> str:
    """A short title of a step: "reward model", "DPO"."""
    config = estimate.config
    if isinstance(config, RewardConfig) and config.trains_policy:
        return config.loss.upper()
    return _TITLES[estimate.number]


def table(estimate: StepEstimate, advice: Sequence[Advice]) -> str:
    """The estimate of one step: its models, every item in every mode, whether it fits."""
    modes, num_processes = estimate.modes, estimate.num_processes
    unit, name = (GIB, "GiB") if estimate.peak.total >= 4 * GIB else (_MIB, "MiB")
    items = [i for i in _ORDER if any(mode.items.get(i) for mode in modes)]
    assert set(items) >= {i for mode in modes for i, n in mode.items.items() if n}
    processes = f"one of {num_processes} processes" if num_processes > 1 else "one process"

    def shown(num_bytes: int) -> str:
        return f"{num_bytes / unit:.{2 if unit == GIB else 0}f}" if num_bytes else "-"

    lines = [
        f"step {estimate.number}, {title_of(estimate)}: {processes}, on {estimate.device.origin}",
        *(f"  {line}" for line in estimate.models),
        "",
        _row(name, [mode.name for mode in modes]),
        *(_row(item, [shown(mode.items.get(item, 0)) for mode in modes]) for item in items),
        _row("total", [shown(mode.total) for mode in modes]),
        "",
        f"  fullest: {_fullest(estimate)}: {_verdict(estimate)}",
        *_host(estimate),
        *_advice_lines(estimate, advice),
    ]
    return "\n".join(lines)


def line(estimate: StepEstimate, advice: Sequence[Advice]) -> str:
    """One line of the log."""
    text = f"plan: step {estimate.number}: {_fullest(estimate)}: {_verdict(estimate)}"
    if advice:
        first = advice[0]
        text += f"; try {first.change.flags(estimate.number)} (saves {_gib(first.saved)})"
    return text


def _fullest(estimate: StepEstimate) -> str:
    mode = estimate.peak
    moment = f" ({mode.moment})" if mode.moment else ""
    return f"{mode.name}{moment}, {_gib(mode.total)} of {_gib(estimate.device.memory)}"


def _verdict(estimate: StepEstimate) -> str:
    if not estimate.fits:
        on_device = estimate.peak.total > estimate.device.memory
        return "DOES NOT FIT" if on_device else "fits on the device, not in host memory"
    share = estimate.peak.total / estimate.device.memory
    return "fits" if share < 0.9 else "fits barely; fragmentation may exceed the device"


def _host(estimate: StepEstimate) -> list[str]:
    if not estimate.host:
        return []
    host_memory = estimate.device.host_memory
    share = f" of {_gib(host_memory)} per process" if host_memory is not None else ""
    parts = ", ".join(f"{name} {_gib(value)}" for name, value in estimate.host.items())
    return [f"  host memory: {_gib(estimate.host.total())}{share}: {parts}"]


def _advice_lines(estimate: StepEstimate, advice: Sequence[Advice]) -> list[str]:
    if estimate.fits:
        return []
    if not advice:
        return ["  no flag lowers it further; use a smaller model or more devices"]
    lines = ["  change first, in this order:"]
    for number, entry in enumerate(advice, 1):
        after = entry.after
        result = "then it fits" if after.fits else f"then it takes {_gib(after.peak.total)}"
        flags = entry.change.flags(estimate.number)
        lines.append(f"    {number}. {flags}: saves {_gib(entry.saved)}, {result}")
    return lines


def _row(name: str, cells: Sequence[str]) -> str:
    return f"  {name:<18}" + "".join(f"{cell:>12}" for cell in cells)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.3g} GiB"
