"""Writes every step's metrics to ``metrics.jsonl``, TensorBoard and Weights & Biases."""

import dataclasses
import importlib.util
import json
import logging
import os
from pathlib import Path
from typing import Any

import yaml

import dschat.distributed as dist
from dschat.config import CommonConfig, UserError

logger = logging.getLogger("dschat")


def check_sinks(config: CommonConfig) -> None:
    """``UserError`` where a sink that ``config`` asks for is not installed."""
    if config.enable_wandb and importlib.util.find_spec("wandb") is None:
        raise UserError(
            "--enable_wandb needs wandb; install it with `pip install dschat[wandb]`, or leave the "
            "flag out"
        )


class MetricsLog:
    """Writes the settings, then one JSON object a step to ``OUTPUT_DIR/metrics.jsonl`` and the same
    numbers to the other sinks.

    Rows that a full disk does not take wait, in memory and in every checkpoint, until it does.
    """

    def __init__(self, output_dir: str | None, config: CommonConfig) -> None:
        self._file: Any = None
        self._tensorboard: Any = None
        self._wandb: Any = None
        self._end = 0  # bytes in the file
        self._unwritten = b""
        self._failing = False  # which is said once
        if not dist.is_main_process() or output_dir is None:
            return
        folder = Path(output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        settings = yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)
        (folder / "training_config.yaml").write_text(settings, encoding="utf-8")
        self._folder = folder
        # A run that goes on keeps what there is, up to where `go_on_from` says.
        mode = "ab" if config.resume else "wb"
        self._file = (folder / "metrics.jsonl").open(mode, buffering=0)
        self._found = self._end = os.fstat(self._file.fileno()).st_size
        self._uses_tensorboard = config.enable_tensorboard
        if config.enable_tensorboard and not config.resume:
            self._start_tensorboard()
        if config.enable_wandb:
            self._start_wandb(config)

    def _start_wandb(self, config: CommonConfig) -> None:
        """A run that goes on stays one run there too."""
        import wandb

        mark, options = self._folder / ".wandb_run", {}
        if config.resume and mark.exists():
            options = {"id": mark.read_text(), "resume": "allow"}
        self._wandb = wandb.init(
            project="dschat", dir=str(self._folder), config=vars(config), **options
        )
        mark.write_text(self._wandb.id)

    def _start_tensorboard(self, **options: Any) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._tensorboard = SummaryWriter(str(self._folder / "tensorboard"), **options)

    @property
    def files(self) -> list[Path]:
        """What `position` speaks of; nothing where another process writes it."""
        return [] if self._file is None else [Path(self._file.name)]

    def position(self) -> dict[str, Any]:
        """Bytes in metrics.jsonl, and the rows that belong behind them and are not written yet."""
        self._write_out()
        return {"bytes": self._end, "rows": self._unwritten.decode()}

    def go_on_from(self, position: dict[str, Any], step: int) -> None:
        """Forget what was recorded after ``position``, which a checkpoint of ``step`` remembers."""
        if self._file is None:
            return
        if position["bytes"] > self._found:
            raise UserError(
                f"{self._file.name} is shorter than when the checkpoint of step {step} was made; "
                "put it back, or begin anew with --restart"
            )
        self._begin_with(position["bytes"], position["rows"].encode())
        if self._uses_tensorboard:
            self._start_tensorboard(purge_step=step + 1)

    def begin(self) -> None:
        """Forget what an earlier run recorded: there was nothing to go on from."""
        if self._file is None:
            return
        if self._found:
            own = Path(self._file.name).read_bytes()[self._found :]
            self._begin_with(0, own + self._unwritten)
        if self._uses_tensorboard and self._tensorboard is None:
            self._start_tensorboard()

    def _begin_with(self, size: int, unwritten: bytes) -> None:
        self._file.truncate(size)
        self._file.seek(size)
        self._end, self._unwritten = size, unwritten
        self._write_out()

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Record ``metrics``, named as ``loss/policy_avg``, under ``step``."""
        if self._file is not None:
            row = {"step": step} | {k: float(v) for k, v in metrics.items()}
            self._unwritten += (json.dumps(row) + "\n").encode()
            self._write_out()
        if self._tensorboard is not None:
            try:
                for name, value in metrics.items():
                    self._tensorboard.add_scalar(name, value, step)
            except OSError as error:
                self._tensorboard = None
                logger.warning("TensorBoard gets no more numbers: %s", error)
        if self._wandb is not None:
            self._wandb.log(metrics, step=step)

    def _write_out(self) -> None:
        try:
            while self._unwritten:
                written = self._file.write(self._unwritten)
                self._end, self._unwritten = self._end + written, self._unwritten[written:]
        except OSError as error:
            if not self._failing:
                logger.warning(
                    "%s cannot be written (%s); training goes on, its rows wait",
                    self._file.name,
                    error.strerror,
                )
            self._failing = True
            return
        if self._failing:
            logger.warning("%s is written again", self._file.name)
        self._failing = False

    def close(self) -> None:
        if self._file is not None:
            self._write_out()
            self._file.close()
        if self._tensorboard is not None:
            try:
                self._tensorboard.close()
            except OSError as error:
                logger.warning("TensorBoard lacks the last numbers: %s", error)
        if self._wandb is not None:
            self._wandb.finish()
