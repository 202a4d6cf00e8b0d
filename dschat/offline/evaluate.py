"""``dschat eval``: evaluates models on local data, with confidence intervals and differences."""

import logging
from typing import TYPE_CHECKING

from dschat.config import parser
from dschat.offline.flags import LIKELIHOOD, EvalConfig

if TYPE_CHECKING:
    from dschat.offline.results import Results

logger = logging.getLogger("dschat")


def main() -> None:
    # Parse before torch loads: --help and mistyped flags answer at once.
    config = parser.parse(EvalConfig)

    from dschat.observability import console

    console.setup(hold=True)
    results = evaluate(config)
    if config.out is not None:
        results.write(config.out)
    console.write_output(results.text())


def evaluate(config: EvalConfig) -> "Results":
    """The metrics of every model and answer file of ``config``.

    Raises:
        UserError: a wrong flag, model, reward source or data, before weights load.
    """
    from dschat.observability import console
    from dschat.offline.items import read_items
    from dschat.offline.judge import Judge
    from dschat.offline.model import Model
    from dschat.offline.results import Results, check_out, labels_of
    from dschat.offline.rows import Rows
    from dschat.offline.tasks import Metrics, likelihood_metrics

    check_out(config.out)
    trust = config.trust_remote_code
    models = [Model.find(path, config.dtype, trust) for path in config.path or ()]
    rows = Rows(config)
    items = read_items(config, rows, models)
    judge = Judge(config, rows.columns, items, models)
    entrants: list[Model | str] = [*models, *(config.answers or ())]
    labels = labels_of([*(config.path or ()), *(config.answers or ())])
    by_label: dict[str, Metrics] = {}
    try:
        console.release()
        for entrant, label in zip(entrants, labels, strict=True):
            metrics = judge.metrics(entrant, label) if config.generates else {}
            if isinstance(entrant, Model) and {*LIKELIHOOD} & {*(config.task or ())}:
                metrics |= likelihood_metrics(config, items, entrant)
            by_label[label] = metrics
            logger.info("%s: %s rows evaluated", label, f"{len(items):,}")
    finally:
        judge.close()
    return Results.of(config, len(items), by_label)
