"""``dschat eval``: evaluates models on local data, with confidence intervals and differences."""

import logging

from dschat.observability import console
from dschat.offline.flags import LIKELIHOOD, EvalConfig
from dschat.offline.items import read_items
from dschat.offline.judge import Judge
from dschat.offline.model import Model
from dschat.offline.results import Results, check_out, labels_of
from dschat.offline.rows import Rows
from dschat.offline.tasks import Metrics, likelihood_metrics

logger = logging.getLogger("dschat")


def evaluate(config: EvalConfig) -> Results:
    """The metrics of every model and answer file of ``config``.

    Raises:
        UserError: a wrong flag, model, reward source or data, before weights load.
    """
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
