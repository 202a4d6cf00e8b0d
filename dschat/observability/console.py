"""Sets up the console: one logger on rank 0, one line per step, progress bars on a terminal."""

import logging
import os
import sys
import threading
import warnings
from collections.abc import Iterable
from contextlib import suppress

from tqdm.auto import tqdm

import dschat.distributed as dist
from dschat.config.errors import printable

logger = logging.getLogger("dschat")
MAX_HOLD_S = 10.0
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
            record.mark = "warning: " if record.levelno == logging.WARNING else ""
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
    handler.setFormatter(logging.Formatter("%(asctime)s %(mark)s%(message)s", "%H:%M:%S"))
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
    """A progress bar on rank 0; silent if standard error is not a terminal."""
    off = disable or not dist.is_main_process() or not sys.stderr.isatty()
    bar = tqdm(total=total, desc=description, disable=off, leave=False, dynamic_ncols=True)
    bar.update(done)
    return bar


def write_output(text: str) -> None:
    """Writes to standard output, whose reader may close it early, as in ``| head``."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def format_line(step: int, total: int, metrics: dict[str, float], columns: Iterable[str]) -> str:
    """One fixed-width line: the step and those of ``columns`` that ``metrics`` has.

    A column shows the last part of its name, or the last two if the last one is ambiguous.
    """
    width = len(str(total))
    present = [c for c in columns if c in metrics]
    last = [c.rsplit("/", 1)[-1] for c in present]
    names = [
        name if last.count(name) == 1 else "/".join(column.split("/")[-2:])
        for column, name in zip(present, last, strict=True)
    ]
    cells = [f"{name} {metrics[c]:>9.4g}" for name, c in zip(names, present, strict=True)]
    return f"step {step:>{width}}/{total}  " + "  ".join(cells)
