"""Estimates every step of a request: the tables of ``--plan`` and the lines of the log."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from dschat.config import CommonConfig, RLHFConfig, SupervisedConfig, UserError
from dschat.estimate import CostRequest, Request, title_of
from dschat.estimate.advice import Advice, Estimator, advise
from dschat.estimate.cost import find_device_speed, scaling_lines, time_lines
from dschat.estimate.models import MODEL_ERRORS, Models
from dschat.estimate.result import GIB, StepEstimate, find_device
from dschat.estimate.rlhf import RLHFEstimator
from dschat.estimate.steps import SupervisedEstimator
from dschat.estimate.timing import Timer

_MIB = 2**20
_ORDER = (
    *("model weights", "actor weights", "critic weights", "reference weights", "reward weights"),
    "teacher weights",
    *("gradients", "optimizer states", "moving average", "rollout copy", "KV cache"),
    *("activations", "logits", "buffers", "file being written", "libraries"),
)


def tables(request: Request, cost: CostRequest | None = None) -> str:
    """The estimate of every step as a table, with its time and dollars where ``cost`` is given.

    Raises:
        UserError: a model without a readable configuration, or settings that DeepSpeed rejects.
    """
    models = Models(request.made_from)
    estimator = make_estimator(request, models)
    times = _times(request, cost, models) if cost else (lambda _: [])
    texts = []
    for number in sorted(request.steps):
        estimate = estimator(request.config(number))
        text = table(estimate, title_of(estimate.config), advise(estimate, estimator))
        texts.append("\n".join([text, *times(estimate)]))
    return "\n\n".join(texts)


def _times(
    request: Request, cost: CostRequest, models: Models
) -> Callable[[StepEstimate], list[str]]:
    """A function from an estimate to the lines of its time and cost."""
    speed = find_device_speed(request)
    if speed is None:
        return lambda _: ["  memory only; for hours and dollars name a GPU with --plan_device"]
    timer = Timer(models, speed, request.processes_here, cost.tokens)

    def estimate_on(config: CommonConfig, num_processes: int) -> StepEstimate:
        return make_estimator(replace(request, num_processes=num_processes), models)(config)

    def lines(estimate: StepEstimate) -> list[str]:
        try:
            return [
                *time_lines(estimate, timer.time(estimate), cost),
                *scaling_lines(estimate, estimate_on, timer, cost),
            ]
        except MODEL_ERRORS as error:
            return [f"  no times: {error}"]

    return lines


def log_lines(request: Request) -> Iterator[str]:
    """One line per step: its estimate, or why there is none."""
    estimator = make_estimator(request)
    for number in sorted(request.steps):
        try:
            estimate = estimator(request.config(number))
            yield line(estimate, advise(estimate, estimator, most=1))
        except UserError as error:
            yield f"no plan: step {number}: {error}"


def make_estimator(request: Request, models: Models | None = None) -> Estimator:
    """A function from a step's configuration to its estimate on the request's device."""
    device = find_device(request.device_memory_gib, request.processes_here, request.device_name)
    models = models or Models(request.made_from)

    def estimate(config: CommonConfig) -> StepEstimate:
        try:
            if isinstance(config, RLHFConfig):
                return RLHFEstimator(models, device, request.num_processes, config).estimate()
            assert isinstance(config, SupervisedConfig)
            return SupervisedEstimator(models, device, request.num_processes, config).estimate()
        except UserError:
            raise
        except MODEL_ERRORS as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise UserError(f"a model of this step cannot be planned: {reason}") from error

    return estimate


def table(estimate: StepEstimate, title: str, advice: Sequence[Advice]) -> str:
    """The estimate of one step: its models, every item in every mode, whether it fits."""
    unit, name = (GIB, "GiB") if estimate.peak.total >= 4 * GIB else (_MIB, "MiB")
    items = [i for i in _ORDER if any(mode.items.get(i) for mode in estimate.modes)]
    assert set(items) >= {i for mode in estimate.modes for i, n in mode.items.items() if n}
    processes = (
        f"one of {estimate.num_processes} processes"
        if estimate.num_processes > 1
        else "one process"
    )
    lines = [f"step {estimate.number}, {title}: {processes}, on {estimate.device.origin}"]
    lines += [f"  {line}" for line in estimate.models]
    lines.append("")
    lines.append(_row(name, [mode.name for mode in estimate.modes]))
    for item in items:
        lines.append(_row(item, [_shown(mode.items.get(item, 0), unit) for mode in estimate.modes]))
    lines.append(_row("total", [_shown(mode.total, unit) for mode in estimate.modes]))
    lines.append("")
    lines.append(f"  fullest: {_fullest(estimate)}: {_verdict(estimate)}")
    lines += _host(estimate)
    lines += _advice_lines(estimate, advice)
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


def _shown(num_bytes: int, unit: int) -> str:
    if not num_bytes:
        return "-"
    return f"{num_bytes / unit:.2f}" if unit == GIB else f"{num_bytes / unit:.0f}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.3g} GiB"
