"""Estimates every step of a request: the tables of ``--plan`` and the lines of the log."""

from collections.abc import Callable, Iterator, Sequence

from dschat.config import RLHFConfig, SupervisedConfig, UserError
from dschat.config.errors import first_line
from dschat.estimate import PlanRequest
from dschat.estimate.devices import GIB, find_device
from dschat.estimate.hours import time_lines
from dschat.estimate.memory import StepEstimate, SupervisedEstimator
from dschat.estimate.models import MODEL_ERRORS, Models
from dschat.estimate.rlhf import RLHFEstimator

_ORDER = (
    *("model weights", "actor weights", "critic weights", "reference weights", "reward weights"),
    "teacher weights",
    *("gradients", "optimizer states", "moving average", "rollout copy", "KV cache"),
    *("activations", "kept by malloc", "buffers", "libraries"),
)


def tables(request: PlanRequest) -> str:
    """The estimate of every step as a table, with its time and dollars on a GPU.

    Raises:
        UserError: a model without a readable configuration, or settings that DeepSpeed rejects.
    """
    estimator = make_estimator(request)
    estimates = map(estimator, sorted(request.steps))
    return "\n\n".join("\n".join([table(e), *time_lines(e, request)]) for e in estimates)


def log_lines(request: PlanRequest) -> Iterator[str]:
    """One line per step: its estimate, or why there is none."""
    estimator = make_estimator(request)
    for number in sorted(request.steps):
        try:
            yield line(estimator(number))
        except UserError as error:
            yield f"no plan: step {number}: {error}"


def make_estimator(request: PlanRequest) -> Callable[[int], StepEstimate]:
    """A function from the number of a step to its estimate on the request's device."""
    device, models = find_device(request), Models(request.made_from)

    def estimate(number: int) -> StepEstimate:
        config = request.config(number)
        try:
            if isinstance(config, RLHFConfig):
                return RLHFEstimator(models, device, request.num_processes, config).estimate()
            assert isinstance(config, SupervisedConfig)
            return SupervisedEstimator(models, device, request.num_processes, config).estimate()
        except UserError:
            raise
        except MODEL_ERRORS as error:
            raise UserError(
                f"a model of this step cannot be planned: {first_line(error)}"
            ) from error

    return estimate


def table(estimate: StepEstimate) -> str:
    """The estimate of one step: its models, every item in every mode, whether it fits."""
    modes, num_processes = estimate.modes, estimate.num_processes
    items = [i for i in _ORDER if any(mode.items.get(i) for mode in modes)]
    assert set(items) >= {i for mode in modes for i, n in mode.items.items() if n}
    processes = f"one of {num_processes} processes" if num_processes > 1 else "one process"

    def shown(num_bytes: int) -> str:
        return f"{num_bytes / GIB:.3f}" if num_bytes else "-"

    lines = [
        f"step {estimate.number}: {processes}, on {estimate.device.origin}",
        *(f"  {line}" for line in estimate.models),
        "",
        _row("GiB", [mode.name for mode in modes]),
        *(_row(item, [shown(mode.items.get(item, 0)) for mode in modes]) for item in items),
        _row("total", [shown(mode.total) for mode in modes]),
        "",
        f"  fullest: {_fullest(estimate)}: {_verdict(estimate)}",
        *_host(estimate),
    ]
    return "\n".join(lines)


def line(estimate: StepEstimate) -> str:
    """One line of the log."""
    return f"plan: step {estimate.number}: {_fullest(estimate)}: {_verdict(estimate)}"


def _fullest(estimate: StepEstimate) -> str:
    mode = estimate.peak
    moment = f" ({mode.moment})" if mode.moment else ""
    return f"{mode.name}{moment}, {_gib(mode.total)} of {_gib(estimate.device.memory)}"


def _verdict(estimate: StepEstimate) -> str:
    if not estimate.fits:
        on_device = estimate.peak.total > estimate.device.memory
        where = "DOES NOT FIT" if on_device else "fits on the device, not in host memory"
        return f"{where}; docs/tuning.md says what to change, in order"
    share = estimate.peak.total / estimate.device.memory
    return "fits" if share < 0.9 else "fits barely; fragmentation may exceed the device"


def _host(estimate: StepEstimate) -> list[str]:
    if not estimate.host:
        return []
    host_memory = estimate.device.host_memory
    share = f" of {_gib(host_memory)} per process" if host_memory is not None else ""
    parts = ", ".join(f"{name} {_gib(value)}" for name, value in estimate.host.items())
    return [f"  host memory: {_gib(estimate.host.total())}{share}: {parts}"]


def _row(name: str, cells: Sequence[str]) -> str:
    return f"  {name:<18}" + "".join(f"{cell:>12}" for cell in cells)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.3g} GiB"
