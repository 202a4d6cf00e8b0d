"""Planning the steps of a request, one after another, as text.

A ``Request`` comes in; the tables of ``--plan`` or the lines of the log go out. It must not know
how memory is counted.
"""

from collections.abc import Callable, Iterator

from dschat.config import CommonConfig, RLHFConfig, UserError
from dschat.estimate import Request, report, title_of
from dschat.estimate.advice import advise
from dschat.estimate.device import find_device
from dschat.estimate.models import Models
from dschat.estimate.modes import StepPlan
from dschat.estimate.rlhf import RLHFStep
from dschat.estimate.steps import SupervisedStep

# NOTE first: it tells DeepSpeed which accelerator there is, before transformers imports it.


def tables(request: Request) -> str:
    """The plan of every step in full.

    Raises:
        UserError: a model whose configuration cannot be had, or settings that DeepSpeed refuses.
    """
    planned = planner(request)
    return "\n\n".join(_table(number, request, planned) for number in sorted(request.steps))


def log_lines(request: Request) -> Iterator[str]:
    """A line for each step; for a step that cannot be planned, why."""
    planned = planner(request)
    for number in sorted(request.steps):
        try:
            plan = planned(request.config(number))
            yield report.line(plan, advise(plan, planned, most=1))
        except UserError as error:
            yield f"no plan: step {number}: {error}"


def planner(request: Request) -> Callable[[CommonConfig], StepPlan]:
    """A function from a step's configuration to its plan on the request's device."""
    device = find_device(request.device_memory_gib, request.processes_here)
    models = Models(request.made_from, by_row=device.on_gpu)

    def plan(config: CommonConfig) -> StepPlan:
        step = RLHFStep if isinstance(config, RLHFConfig) else SupervisedStep
        return step(models, device, request.num_processes, config).plan()

    return plan


def _table(number: int, request: Request, planned: Callable[[CommonConfig], StepPlan]) -> str:
    config = request.config(number)
    plan = planned(config)
    return report.table(plan, title_of(config), advise(plan, planned))
