"""Sets up the console: one logger on rank 0, one line per step, progress bars on a terminal."""

import logging
import math
import os
import re
import sys
import threading
import warnings
from collections.abc import Iterable
from contextlib import suppress
from io import StringIO

from tqdm.auto import tqdm

import dschat.distributed as dist
from dschat.config.errors import printable

logger = logging.getLogger("dschat")
MAX_HOLD_S = 10.0
# Shown under another name than the last part of theirs: the same in training and evaluation.
_NAMES = {"scores": "score", "answer_length": "length"}
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


class _Formatter(logging.Formatter):
    """Marks warnings."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        if record.levelno == logging.WARNING:
            record.message = f"warning: {record.message}"
        return super().formatMessage(record)


class _TqdmHandler(logging.Handler):
    """Prints above a running progress bar. `hold` buffers records until `unhold`."""

    def __init__(self) -> None:
        super().__init__()
        self._buffer: list[logging.LogRecord] | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if self._buffer is not None:
            self._buffer.append(record)
        else:
            # NOTE one write: Ctrl-C between text and newline would append to this line. A closed
            # terminal or pipe loses the line, but does not stop the run.
            text = self.format(record)
            text = text if hasattr(record, "is_styled") else printable(text)  # by `extra`
            with suppress(OSError), tqdm.external_write_mode(file=sys.stderr):
                sys.stderr.write(text + "\n")

    def hold(self, seconds: float) -> None:
        """Buffer records until `unhold`, for at most ``seconds``."""
        self._buffer = []
        timer = threading.Timer(seconds, self.unhold)
        timer.daemon = True
        timer.start()

    def unhold(self) -> None:  # NOTE logging calls a method `release` to unlock the handler
        """Print the buffered records; later ones print at once."""
        assert self.lock is not None
        with self.lock:
            records, self._buffer = self._buffer or [], None
            for record in records:
                self.emit(record)


def setup(level: str = "info", hold: bool = False) -> None:
    """Set up logging: one handler with timestamps; INFO on rank 0, errors on other ranks.

    Libraries log errors only, unless ``level`` is debug. ``hold``: lines wait for `release`, but
    at most ``MAX_HOLD_S``. An error during the checks of names and data is then the only line on
    the screen, and slow checks still report their progress.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logger.handlers.clear()
    handler = _TqdmHandler()
    handler.setFormatter(_Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    if hold and level != "debug":
        handler.hold(MAX_HOLD_S)
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(level.upper() if dist.is_main_process() else logging.ERROR)
    verbose = level == "debug"
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.INFO if verbose else logging.ERROR)
    if not verbose:
        # NOTE: libraries warn about each other's deprecated calls, some on every step.
        warnings.filterwarnings("ignore", category=FutureWarning, module="|".join(_NOISY).lower())
        warnings.filterwarnings("ignore", category=UserWarning, module="torch")


def release() -> None:
    """Print the lines that `setup` held back; later lines print at once."""
    for handler in logger.handlers:
        if isinstance(handler, _TqdmHandler):
            handler.unhold()


def progress(total: int, description: str, disable: bool = False, done: int = 0) -> tqdm:
    """A progress bar on rank 0; one that only counts if standard error is not a terminal."""
    off, is_shown = disable or not dist.is_main_process(), sys.stderr.isatty()
    place = {} if is_shown else {"file": StringIO(), "delay": math.inf}
    options = {"total": total, "desc": description, "initial": done, "disable": off}
    return tqdm(**options, **place, leave=False, dynamic_ncols=True)


def write_output(text: str) -> None:
    """Writes to standard output, whose reader may close it early, as in ``| head``."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def format_line(
    label: str, step: int, total: int, metrics: dict[str, float], columns: Iterable[str]
) -> str:
    """One fixed-width line: the step after its ``label``, and the ``columns`` that ``metrics``
    has.

    A column shows the last part of its name, or the last two if the last one is ambiguous.
    """
    present = [c for c in columns if c in metrics]
    last = [_NAMES.get(name, name) for name in (c.rsplit("/", 1)[-1] for c in present)]
    names = [
        name if last.count(name) == 1 else "/".join(column.split("/")[-2:])
        for column, name in zip(present, last, strict=True)
    ]
    cells = [f"{name} {_short(metrics[c]):6}" for name, c in zip(names, present, strict=True)]
    return "  ".join([f"{label} {step:>{len(str(total))}}/{total}", *cells]).rstrip()


def _short(value: float) -> str:
    """With as many of four digits as six characters hold; ``e-6`` for ``e-06``."""
    forms = [".0f"] if 1e3 <= abs(value) < 1e5 else [".4g", ".3g", ".2g", ".1e", ".0e"]
    texts = [re.sub("(e.)0", r"\1", f"{value:{form}}") for form in forms]
    return next((text for text in texts if len(text) <= 6), texts[-1])


def eta(bar: tqdm) -> str:
    """The end of a line, by the pace of ``bar``; "" on a terminal, which shows the bar."""
    pace = bar.format_dict
    done = pace["n"] - (pace["initial"] or 0)
    left = pace["total"] - pace["n"]
    if sys.stderr.isatty() or not left * done * pace["elapsed"]:
        return ""
    seconds = left * pace["elapsed"] / done
    return f"  eta {tqdm.format_interval(math.ceil(seconds))}"
