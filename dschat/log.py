"""What the user sees: one logger on rank 0, one line a step, a progress bar, and the same numbers
to every sink.

Comes in: metric dicts of floats. Goes out: the console, ``metrics.jsonl``, TensorBoard, Weights &
Biases. It must not know what is being trained.
"""

import dataclasses
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from tqdm.auto import tqdm

from dschat import dist
from dschat.config import CommonConfig, UserError

logger = logging.getLogger("dschat")

_NOISY = (
    "transformers",
    "datasets",
    "huggingface_hub",
    "httpx",
    "filelock",
    "DeepSpeed",
    "torch",
    "peft",
)


class _TqdmHandler(logging.Handler):
    """Prints above a running progress bar instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)


def setup(level: str = "info") -> None:
    """One handler, on rank 0, with the time; other ranks speak only of errors. Libraries are
    quieted.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logger.handlers.clear()
    handler = _TqdmHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(level.upper() if dist.is_main_process() else logging.ERROR)
    verbose = level == "debug"
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.INFO if verbose else logging.ERROR)
    if not verbose:
        # NOTE: torch and DeepSpeed deprecate each other's calls on every step; none of it is the
        # user's.
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
        warnings.filterwarnings("ignore", category=UserWarning, module="torch")


def progress(total: int, description: str, disable: bool = False) -> tqdm:
    """A progress bar on rank 0's terminal; silent where standard error is not one."""
    off = disable or not dist.is_main_process() or not sys.stderr.isatty()
    return tqdm(total=total, desc=description, disable=off, leave=False, dynamic_ncols=True)


def format_line(step: int, total: int, metrics: dict[str, float], columns: Iterable[str]) -> str:
    """One fixed-width line: the step and the named columns that are present."""
    width = len(str(total))
    cells = [f"{c.rsplit('/', 1)[-1]} {metrics[c]:>9.4g}" for c in columns if c in metrics]
    return f"step {step:>{width}}/{total}  " + "  ".join(cells)


class MetricsLog:
    """Writes the settings, then one JSON object a step to ``OUTPUT_DIR/metrics.jsonl`` and the same
    numbers to the
    other sinks.
    """

    def __init__(self, output_dir: str | None, config: CommonConfig) -> None:
        self._file: Any = None
        self._tensorboard: Any = None
        self._wandb: Any = None
        if not dist.is_main_process() or output_dir is None:
            return
        folder = Path(output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        settings = yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)
        (folder / "training_config.yaml").write_text(settings, encoding="utf-8")
        self._file = (folder / "metrics.jsonl").open("w", encoding="utf-8")
        if config.enable_tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(str(folder / "tensorboard"))
        if config.enable_wandb:
            try:
                import wandb
            except ImportError as error:
                raise UserError(
                    "--enable_wandb needs wandb; install it with `pip install dschat[wandb]`"
                ) from error
            self._wandb = wandb.init(project="dschat", dir=str(folder), config=vars(config))

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Record ``metrics``, named as ``loss/policy_avg``, under ``step``."""
        if self._file is not None:
            row = {"step": step} | {k: float(v) for k, v in metrics.items()}
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
        if self._tensorboard is not None:
            for name, value in metrics.items():
                self._tensorboard.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(metrics, step=step)

    def close(self) -> None:
        for sink, method in (
            (self._file, "close"),
            (self._tensorboard, "close"),
            (self._wandb, "finish"),
        ):
            if sink is not None:
                getattr(sink, method)()
