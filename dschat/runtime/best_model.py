"""Keeps the model of a run's best evaluation in a folder beside its last model: --keep_best."""

import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dschat.checkpoint.compatibility import model_fingerprint
from dschat.config import CommonConfig
from dschat.config.errors import require
from dschat.config.fields import AUTO

logger = logging.getLogger("dschat")

NO_HELD_OUT = "nothing is held out; see --eval_data_path, --eval_fraction, --max_eval_samples"
_LOWER_IS_BETTER = ("eval/loss", "eval/perplexity", "eval/teacher_kl")


def check_best(config: CommonConfig, metrics: Sequence[str], num_held_out: int) -> None:
    """``UserError`` where ``keep_best`` names none of the ``metrics`` of evaluations, less their
    prefix ``eval/``, or where there are no evaluations, for which nothing is held out.
    """
    wanted, known = config.keep_best, [f"eval/{name}" for name in metrics]
    require(not wanted or num_held_out > 0, f"--keep_best needs evaluations, but {NO_HELD_OUT}")
    others = f"--keep_best {wanted} is not measured; choose from {', '.join(known)}"
    require(wanted in (None, AUTO, *known), others)


class BestModel:
    """The best evaluation of a run so far, and its model where ``config`` keeps it: ``save`` writes
    it into the folder ``name`` of the output folder. Collective.
    """

    def __init__(self, config: CommonConfig, name: str, save: Callable[[Path], None]) -> None:
        self._config, self._save = config, save
        self.folder = Path(config.output_dir or "") / name
        self.metric = ""
        self.value = -math.inf  # of the model in `folder`; -inf: none is kept
        self._print: str | None = None  # its fingerprint

    def state(self) -> dict[str, Any]:
        return {"best": self.value, "best_metric": self.metric, "best_print": self._print}

    def restore(self, values: dict[str, Any]) -> None:
        self.metric = values["best_metric"]
        # After it the folder may have got a model of a branch that is given up.
        self._print = model_fingerprint(str(self.folder))
        if values["best_print"] == self._print:
            self.value = values["best"]

    def take(
        self, metrics: dict[str, float], leading: str, when: str, is_doubtful: bool = False
    ) -> None:
        """Collective. Save the model if an evaluation is the best so far; ``leading``: by which of
        its ``metrics``, unless the user named one.
        """
        keep_best = self._config.keep_best
        name = leading if keep_best is None or keep_best == AUTO else keep_best
        if name != self.metric:
            self.metric, self.value = name, -math.inf
        sign = -1.0 if name in _LOWER_IS_BETTER else 1.0
        before = self.value if self.value > -math.inf else -sign * math.inf
        if keep_best is None or not sign * metrics[name] > sign * before:
            return
        if keep_best == AUTO and is_doubtful:
            logger.info("%s %.4f is not kept: the run has warned", name, metrics[name])
            return
        self.value = metrics[name]
        self._save(self.folder)
        self._print = model_fingerprint(str(self.folder))
        said = "best %s so far: %.4f at %s, saved as %s"
        logger.info(said, name, self.value, when, self.folder)
