"""Writes every step's metrics to ``metrics.jsonl``, TensorBoard and trackers.

Files of rows are truncated by a resumed run to its checkpoint's position. If the disk is full, rows
wait in memory and in checkpoints until they can be written.
"""

import dataclasses
import json
import logging
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from io import BytesIO, FileIO
from pathlib import Path
from typing import Any, Literal

import yaml

import dschat.distributed as dist
from dschat import __version__
from dschat.config import CommonConfig
from dschat.observability.trackers import Trackers
from dschat.observability.verdict import verdict
from dschat.startup.files import no_link, replace_file

logger = logging.getLogger("dschat")


Row = dict[str, Any]


class RowFile:
    """One JSON object per line of ``path``.

    With ``keeps_rows`` the rows of an earlier run stay until `resume_from` or `begin` drops them.
    """

    def __init__(self, path: Path, keeps_rows: bool) -> None:
        self.path = path
        mode = "ab" if keeps_rows else "wb"
        self._file = FileIO(path, mode, opener=no_link)
        self._initial_size = self._end = os.fstat(self._file.fileno()).st_size
        self._unwritten = b""
        self._failing = False  # the last write failed; logged once

    def position(self) -> dict[str, Any]:
        """The size of the file in bytes, and the rows not yet written after it."""
        self._write_out()
        return {"bytes": self._end, "rows": self._unwritten.decode()}

    def resume_from(self, position: Mapping[str, Any], step: int) -> None:
        """Drop rows after ``position``, the one saved in the checkpoint of ``step``.

        Rows of later steps, and what is no whole row, are dropped too, with a warning: the file may
        have been edited or cut.
        """
        kept = self.path.read_bytes()[: min(position["bytes"], self._initial_size)]
        is_short = len(kept) < position["bytes"]
        # A row that a full disk cut is whole again.
        found = kept + b"\n" * is_short + position["rows"].encode()
        rows = b"".join(
            line
            for line in BytesIO(found)
            if line.endswith(b"\n") and (row := parsed_row(line)) and row["step"] <= step
        )
        if rows != found:
            logger.warning("%s lacks rows of the first %d steps: they are lost", self.path, step)
        size = len(kept) if rows.startswith(kept) else 0
        self._truncate(size, rows[size:])

    def begin(self) -> None:
        """Drop the rows of an earlier run: this one starts without a checkpoint."""
        if self._initial_size:
            new_rows = self.path.read_bytes()[self._initial_size :]
            self._truncate(0, new_rows + self._unwritten)

    def _truncate(self, size: int, unwritten: bytes) -> None:
        """Cut the file to ``size`` bytes, then write ``unwritten``."""
        self._file.truncate(size)
        self._file.seek(size)
        self._end, self._unwritten = size, unwritten
        self._write_out()

    def write(self, row: Mapping[str, Any]) -> None:
        """Append ``row``. JSON has no NaN and infinity: they become null."""
        text = json.dumps(row)
        if "NaN" in text or "Infinity" in text:
            text = json.dumps(json.loads(text, parse_constant=lambda _: None))
        self._unwritten += (text + "\n").encode()
        self._write_out()

    def _write_out(self) -> None:
        try:
            while self._unwritten:
                written = self._file.write(self._unwritten)
                self._end, self._unwritten = self._end + written, self._unwritten[written:]
        except OSError as error:
            if not self._failing:
                logger.warning(
                    "%s cannot be written (%s); training continues, rows wait in memory",
                    self.path,
                    error.strerror,
                )
            self._failing = True
            return
        if self._failing:
            logger.warning("%s is writable again", self.path)
        self._failing = False

    def close(self) -> None:
        self._write_out()
        self._file.close()


def parsed_row(line: str | bytes) -> Row | None:
    """The row in a line; None where it is not a JSON object with a step."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = row.get("step") if isinstance(row, dict) else None
    return row if isinstance(step, int) and is_finite(step) else None


def whole_rows(path: Path, is_valid: Callable[[Row], bool] = lambda row: True) -> list[Row]:
    """The rows of a file, and none where it cannot be read: a log never ends a run.

    Damaged lines are left out, with a warning; so is the last one where it is still being written.
    """
    try:
        with open(path, encoding="utf-8", errors="replace", opener=no_link) as file:
            rows = [parsed_row(line) for line in file if line.endswith("\n")]
    except FileNotFoundError:
        return []
    except OSError as error:
        logger.warning("%s cannot be read: %s", path, error.strerror)
        return []
    whole = [row for row in rows if row is not None and is_valid(row)]
    if len(whole) < len(rows):
        logger.warning("%s: damaged lines left out: %d", path, len(rows) - len(whole))
    return whole


def is_finite(value: Any) -> bool:
    """Whether the value of a row is a number, and finite."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and abs(value) <= sys.float_info.max


METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
WARNINGS = "warnings.jsonl"
SETTINGS = "training_config.yaml"


class MetricsLog:
    """Writes the settings to ``OUTPUT_DIR/training_config.yaml`` and one JSON object per step to
    ``OUTPUT_DIR/metrics.jsonl``; the same metrics go to the other sinks. Rows of sample answers go
    to ``OUTPUT_DIR/samples.jsonl``, as tables to W&B.
    """

    def __init__(
        self, output_dir: str | None, config: CommonConfig, has_samples: bool = False
    ) -> None:
        self._rows: RowFile | None = None
        self._others: dict[str, RowFile] = {}  # samples and warnings
        self._tensorboard: Any = None
        self._trackers = Trackers()
        if not dist.is_main_process() or output_dir is None:
            return
        folder = Path(output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        settings = dataclasses.asdict(config)
        replace_file(folder / SETTINGS, yaml.safe_dump(settings, sort_keys=False))
        self._folder = folder
        # A resumed run keeps the rows up to the position passed to `resume_from`.
        keeps_rows = bool(config.resume)
        self._is_restart = _has_rows(folder / METRICS)
        self._rows = RowFile(folder / METRICS, keeps_rows)
        self._others["warnings"] = RowFile(folder / WARNINGS, keeps_rows)
        if has_samples:
            self._others["samples"] = RowFile(folder / SAMPLES, keeps_rows)
        self._uses_tensorboard = "tensorboard" in config.report_to
        if self._uses_tensorboard and not config.resume:
            self._start_tensorboard()
        self._trackers = Trackers(config.report_to)
        self._trackers.tell("start", folder, settings, keeps_rows)

    def _start_tensorboard(self, **options: Any) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._tensorboard = SummaryWriter(str(self._folder / "tensorboard"), **options)

    @property
    def _row_files(self) -> list[RowFile]:
        return [] if self._rows is None else [self._rows, *self._others.values()]

    @property
    def files(self) -> list[Path]:
        """The files that `position` refers to; none on processes that do not write."""
        return [file.path for file in self._row_files]

    def position(self) -> dict[str, Any]:
        """The size of metrics.jsonl in bytes, and the rows not yet written after it; the same of
        the files beside it.
        """
        if self._rows is None:
            return {"bytes": 0, "rows": ""}
        return self._rows.position() | {name: f.position() for name, f in self._others.items()}

    def resume_from(self, position: dict[str, Any], step: int) -> None:
        """Drop rows after ``position``, the one saved in the checkpoint of ``step``."""
        if self._rows is None:
            return
        self._rows.resume_from(position, step)
        for name, file in self._others.items():  # older checkpoints have no position of theirs
            file.resume_from(position.get(name, {"bytes": 0, "rows": ""}), step)
        if self._uses_tensorboard:
            self._start_tensorboard(purge_step=step + 1)
        record_start(self._folder, "resume", step)

    def begin(self) -> None:
        """Drop the rows of an earlier run: this one starts without a checkpoint."""
        if self._rows is None:
            return
        for file in self._row_files:
            file.begin()
        if self._uses_tensorboard and self._tensorboard is None:
            self._start_tensorboard()
        record_start(self._folder, "restart" if self._is_restart else "start", 0)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Record ``metrics``, named as ``loss/policy_avg``, under ``step``."""
        if self._rows is not None:
            self._rows.write({"step": step} | {k: float(v) for k, v in metrics.items()})
        if self._tensorboard is not None:
            try:
                for name, value in metrics.items():
                    self._tensorboard.add_scalar(name, value, step)
            except OSError as error:
                self._tensorboard = None
                logger.warning("TensorBoard is off from here on: %s", error)
        self._trackers.tell("write", step, metrics)

    def write_warnings(self, step: int, found: Sequence[Any]) -> None:
        """Log what was ``found`` to be wrong, and record it under ``step`` of warnings.jsonl."""
        for finding in found:
            logger.warning("%s", finding)
            if self._others:
                self._others["warnings"].write({"step": step, "warning": str(finding)})

    def write_verdict(self, num_held_out: int, where: str) -> None:
        """Log the verdict on the run's metrics, and record it in warnings.jsonl: a bad one is a
        warning too. See `dschat.observability.verdict`.
        """
        rows = whole_rows(self._folder / METRICS) if self._rows is not None else []
        if found := verdict(rows, num_held_out, where):
            text, is_bad = found
            logger.log(logging.WARNING if is_bad else logging.INFO, "%s", text)
            row = {"step": rows[-1]["step"], "verdict": text}
            self._others["warnings"].write(row | ({"warning": text} if is_bad else {}))

    def log_change(self, name: str) -> None:
        """Log a held-out metric before and after training, where both are known."""
        rows = whole_rows(self._folder / METRICS) if self._rows is not None else []
        if len(values := [row[name] for row in rows if is_finite(row.get(name))]) > 1:
            shown = name.removeprefix("eval/")
            logger.info("held-out %s: %.4g at first, %.4g at the end", shown, values[0], values[-1])

    def write_samples(self, step: int, row: Mapping[str, Any]) -> None:
        """Record ``row`` of samples.jsonl under ``step``."""
        if "samples" in self._others:
            self._others["samples"].write({"step": step} | dict(row))

    def write_answers(self, step: int, table: Sequence[Mapping[str, Any]]) -> None:
        """Show answers in the trackers: one mapping of column to text or number for each."""
        self._trackers.tell("write_answers", step, table)

    def close(self) -> None:
        for file in self._row_files:
            file.close()
        if self._tensorboard is not None:
            try:
                self._tensorboard.close()
            except OSError as error:
                logger.warning("TensorBoard lacks the last metrics: %s", error)
        self._trackers.tell("close")


def _has_rows(path: Path) -> bool:
    return path.is_file() and path.stat().st_size > 0


# -- starts ----------------------------------------------------------------------------------------

STARTS = "starts.jsonl"
Event = Literal["start", "resume", "restart"]
_LIBRARIES = ("torch", "deepspeed", "transformers", "datasets", "peft", "numpy")


def record_start(folder: Path, event: Event, step: int) -> None:
    """Append a row to ``OUTPUT_DIR/starts.jsonl``: when, on what, and the ``step`` that training
    continues from, 0 at the start. A disk that is full costs the row, not the run.
    """
    import torch

    device = dist.device()
    on_gpu = device.type == "cuda"
    row = {
        "event": event,
        "step": step,
        "time": time.time(),
        "processes": dist.world_size(),
        "device": torch.cuda.get_device_name(device) if on_gpu else device.type,
        "host": platform.node(),
        "versions": versions(),
    }
    try:
        with open(folder / STARTS, "a", encoding="utf-8", opener=no_link) as file:
            file.write(json.dumps(row) + "\n")
    except OSError as error:
        logger.warning("%s cannot be written: %s", folder / STARTS, error.strerror)


def versions() -> dict[str, str]:
    """The versions of Python, dschat and the libraries that training runs on."""
    import torch

    found = {"python": platform.python_version(), "dschat": __version__}
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["CUDA"] = torch.version.cuda
    return found
