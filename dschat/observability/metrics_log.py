"""Writes every step's metrics to ``metrics.jsonl``, TensorBoard and Weights & Biases."""

import dataclasses
import importlib.util
import json
import logging
import os
from io import FileIO
from pathlib import Path
from typing import Any, Literal

import yaml

import dschat.distributed as dist
from dschat.config import CommonConfig, UserError

logger = logging.getLogger("dschat")


def check_sinks(config: CommonConfig) -> None:
    """Raise ``UserError`` if a sink that ``config`` enables is not installed."""
    if config.enable_wandb and importlib.util.find_spec("wandb") is None:
        raise UserError(
            "--enable_wandb needs wandb; install it with `pip install dschat[wandb]`, or leave the "
            "flag out"
        )


class MetricsLog:
    """Writes the settings to ``OUTPUT_DIR/training_config.yaml`` and one JSON object per step to
    ``OUTPUT_DIR/metrics.jsonl``; the same metrics go to the other sinks.

    If the disk is full, rows wait in memory and in checkpoints until they can be written.
    """

    def __init__(self, output_dir: str | None, config: CommonConfig) -> None:
        self._file: FileIO | None = None
        self._tensorboard: Any = None
        self._wandb: Any = None
        self._end = 0  # bytes in the file
        self._unwritten = b""
        self._failing = False  # the last write failed; logged once
        if not dist.is_main_process() or output_dir is None:
            return
        folder = Path(output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        settings = yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)
        (folder / "training_config.yaml").write_text(settings, encoding="utf-8")
        self._folder = folder
        # A resumed run keeps the rows up to the position passed to `resume_from`.
        mode: Literal["ab", "wb"] = "ab" if config.resume else "wb"
        self._file = (folder / "metrics.jsonl").open(mode, buffering=0)
        self._initial_size = self._end = os.fstat(self._file.fileno()).st_size
        self._uses_tensorboard = config.enable_tensorboard
        if config.enable_tensorboard and not config.resume:
            self._start_tensorboard()
        if config.enable_wandb:
            self._start_wandb(config)

    def _start_wandb(self, config: CommonConfig) -> None:
        """Start a W&B run; a resumed run continues its W&B run."""
        import wandb

        mark, options = self._folder / ".wandb_run", {}
        if config.resume and mark.exists():
            options = {"id": mark.read_text(), "resume": "allow"}
        self._wandb = wandb.init(
            project="dschat", dir=str(self._folder), config=dataclasses.asdict(config), **options
        )
        mark.write_text(self._wandb.id)

    def _start_tensorboard(self, **options: Any) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._tensorboard = SummaryWriter(str(self._folder / "tensorboard"), **options)

    @property
    def files(self) -> list[Path]:
        """The files that `position` refers to; none on processes that do not write."""
        return [] if self._file is None else [Path(self._file.name)]

    def position(self) -> dict[str, Any]:
        """The size of metrics.jsonl in bytes, and the rows not yet written after it."""
        self._write_out()
        return {"bytes": self._end, "rows": self._unwritten.decode()}

    def resume_from(self, position: dict[str, Any], step: int) -> None:
        """Drop rows after ``position``, the one saved in the checkpoint of ``step``.

        Raises:
            UserError: metrics.jsonl is shorter than that.
        """
        if self._file is None:
            return
        if position["bytes"] > self._initial_size:
            raise UserError(
                f"{self._file.name} is shorter than when the checkpoint of step {step} was saved; "
                "restore it, or start over with --restart"
            )
        self._truncate(position["bytes"], position["rows"].encode())
        if self._uses_tensorboard:
            self._start_tensorboard(purge_step=step + 1)

    def begin(self) -> None:
        """Drop the rows of an earlier run, when there is no checkpoint to resume from."""
        if self._file is None:
            return
        if self._initial_size:
            new_rows = Path(self._file.name).read_bytes()[self._initial_size :]
            self._truncate(0, new_rows + self._unwritten)
        if self._uses_tensorboard and self._tensorboard is None:
            self._start_tensorboard()

    def _truncate(self, size: int, unwritten: bytes) -> None:
        """Cut the file to ``size`` bytes, then write ``unwritten``."""
        assert self._file is not None
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
                logger.warning("TensorBoard is off from here on: %s", error)
        if self._wandb is not None:
            self._wandb.log(metrics, step=step)

    def _write_out(self) -> None:
        if self._file is None:
            return
        try:
            while self._unwritten:
                written = self._file.write(self._unwritten)
                self._end, self._unwritten = self._end + written, self._unwritten[written:]
        except OSError as error:
            if not self._failing:
                logger.warning(
                    "%s cannot be written (%s); training continues, rows wait in memory",
                    self._file.name,
                    error.strerror,
                )
            self._failing = True
            return
        if self._failing:
            logger.warning("%s is writable again", self._file.name)
        self._failing = False

    def close(self) -> None:
        if self._file is not None:
            self._write_out()
            self._file.close()
        if self._tensorboard is not None:
            try:
                self._tensorboard.close()
            except OSError as error:
                logger.warning("TensorBoard lacks the last metrics: %s", error)
        if self._wandb is not None:
            self._wandb.finish()
