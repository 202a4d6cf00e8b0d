"""Sends metrics and sample answers to trackers of experiments: Weights & Biases, trackio, MLflow.

Each takes its place of storage and its login from its own environment variables. A tracker that
fails is turned off with a warning; training continues. A resumed run continues its runs there.
"""

import importlib
import importlib.util
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dschat.config import UserError
from dschat.startup.files import replace_file

logger = logging.getLogger("dschat")


class _Tracker:
    def __init__(self, name: str) -> None:
        self._name = name

    def start(self, folder: Path, settings: dict[str, Any], is_resumed: bool) -> None:
        """Start a run, or continue the one that a file in ``folder`` names."""
        self._module, mark = importlib.import_module(self._name), folder / f".{self._name}_run"
        known = mark.read_text() if is_resumed and mark.is_file() else ""
        replace_file(mark, self._begin(folder, settings, known))

    def _begin(self, folder: Path, settings: dict[str, Any], known: str) -> str:
        """``known``: what this returned for the run to continue, or ""."""
        raise NotImplementedError


class _Wandb(_Tracker):
    """Weights & Biases, or trackio, which has the same interface."""

    def _begin(self, folder: Path, settings: dict[str, Any], known: str) -> str:
        key, options = ("id", {"dir": str(folder)}) if self._name == "wandb" else ("name", {})
        if known:
            options |= {key: known, "resume": "allow"}
        self._run = self._module.init(project="dschat", config=settings, **options)
        return str(getattr(self._run, key))

    def write(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def write_answers(self, step: int, table: list[dict[str, Any]]) -> None:
        data = [list(answer.values()) for answer in table]
        self.write(step, {"samples": self._module.Table(columns=list(table[0]), data=data)})

    def close(self) -> None:
        self._run.finish()


class _MLflow(_Tracker):
    def _begin(self, folder: Path, settings: dict[str, Any], known: str) -> str:
        self._module.set_experiment("dschat")
        run = self._module.start_run(run_id=known or None)
        if not known:  # a parameter never changes
            self._module.log_params(settings)
        return str(run.info.run_id)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        allowed = {re.sub(r"[^\w\-. :/]", "_", name): value for name, value in metrics.items()}
        self._module.log_metrics(allowed, step=step)

    def write_answers(self, step: int, table: list[dict[str, Any]]) -> None:
        self._module.log_dict({"samples": table}, f"samples/{step}.json")

    def close(self) -> None:
        self._module.end_run()


_TRACKERS = {"wandb": _Wandb, "trackio": _Wandb, "mlflow": _MLflow}


def check_trackers(names: Sequence[str]) -> None:
    """Raise ``UserError`` for a tracker among ``names`` that is not installed."""
    for name in _TRACKERS:
        if name in names and importlib.util.find_spec(name) is None:
            raise UserError(
                f"--report_to {name} needs {name}; install it with `pip install dschat[{name}]`, "
                "or leave it out"
            )


class Trackers:
    """The trackers among ``names``."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._on = {name: made(name) for name, made in _TRACKERS.items() if name in names}

    def tell(self, method: str, *args: Any) -> None:
        """Call start, write, write_answers or close of each."""
        for name, tracker in list(self._on.items()):
            try:
                getattr(tracker, method)(*args)
            except Exception as error:  # its server, its login, its disk
                del self._on[name]
                logger.warning("%s is off from here on: %s", name, error)
