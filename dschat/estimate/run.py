"""Estimates every step of a request: the tables of ``--plan`` and the lines of the log."""

from collections.abc import Iterator

from dschat.config import CommonConfig, RLHFConfig, SupervisedConfig, UserError
from dschat.estimate import Request, report, title_of
from dschat.estimate.advice import Estimator, advise
from dschat.estimate.device import find_device
from dschat.estimate.models import Models
from dschat.estimate.modes import StepEstimate
from dschat.estimate.rlhf import RLHFEstimator
from dschat.estimate.steps import SupervisedEstimator


def tables(request: Request) -> str:
    """The estimate of every step as a table.

    Raises:
        UserError: a model without a readable configuration, or settings that DeepSpeed rejects.
    """
    estimator = make_estimator(request)
    return "\n\n".join(_table(number, request, estimator) for number in sorted(request.steps))


def log_lines(request: Request) -> Iterator[str]:
    """One line per step: its estimate, or why there is none."""
    estimator = make_estimator(request)
    for number in sorted(request.steps):
        try:
            estimate = estimator(request.config(number))
            yield report.line(estimate, advise(estimate, estimator, most=1))
        except UserError as error:
            yield f"no plan: step {number}: {error}"


def make_estimator(request: Request) -> Estimator:
    """A function from a step's configuration to its estimate on the request's device."""
    device = find_device(request.device_memory_gib, request.processes_here)
    models = Models(request.made_from)

    def estimate(config: CommonConfig) -> StepEstimate:
        if isinstance(config, RLHFConfig):
            return RLHFEstimator(models, device, request.num_processes, config).estimate()
        assert isinstance(config, SupervisedConfig)
        return SupervisedEstimator(models, device, request.num_processes, config).estimate()

    return estimate


def _table(number: int, request: Request, estimator: Estimator) -> str:
    config = request.config(number)
    estimate = estimator(config)
    return report.table(estimate, title_of(config), advise(estimate, estimator))
