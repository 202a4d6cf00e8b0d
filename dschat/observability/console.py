"""The console: one logger on rank 0, one line a step, a progress bar on a terminal."""

import logging
import os
import sys
import threading
import warnings
from collections.abc import Iterable
from contextlib import suppress

from tqdm.auto import tqdm

import dschat.distributed as dist

logger = logging.getLogger("dschat")
HELD_S = 10.0
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
    """Prints above a running progress bar instead of through it; while it holds, not yet."""

    def __init__(self) -> None:
        super().__init__()
        self._held: list[logging.LogRecord] | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if self._held is not None:
            self._held.append(record)
        else:
            # NOTE one write: Ctrl-C between a line and its end would put its own line beside it.
            # A reader or a terminal that is gone costs the line, not the run.
            with suppress(OSError), tqdm.external_write_mode(file=sys.stderr):
                sys.stderr.write(self.format(record) + "\n")

    def hold(self, seconds: float) -> None:
        self._held = []
        timer = threading.Timer(seconds, self.speak)
        timer.daemon = True
        timer.start()

    def speak(self) -> None:
        with self.lock:
            held, self._held = self._held or [], None
            for record in held:
                self.emit(record)


def setup(level: str = "info", hold: bool = False) -> None:
    """One handler, on rank 0, with the time; other ranks speak only of errors. Libraries are
    quieted.

    ``hold``: lines wait for `release`, but not longer than ``HELD_S``. So a mistake that shows
    while names and data are checked is the one line on the screen, and a check that takes its time
    still says what it is doing.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logger.handlers.clear()
    handler = _TqdmHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    if hold and level != "debug":
        handler.hold(HELD_S)
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


def release() -> None:
    """Nothing was wrong: print the lines that `setup` held back, and every later one at once."""
    for handler in logger.handlers:
        if isinstance(handler, _TqdmHandler):
            handler.speak()


def progress(total: int, description: str, disable: bool = False, done: int = 0) -> tqdm:
    """A progress bar on rank 0's terminal; silent where standard error is not one."""
    off = disable or not dist.is_main_process() or not sys.stderr.isatty()
    bar = tqdm(total=total, desc=description, disable=off, leave=False, dynamic_ncols=True)
    bar.update(done)
    return bar


def format_line(step: int, total: int, metrics: dict[str, float], columns: Iterable[str]) -> str:
    """One fixed-width line: the step and the named columns that are present, by the last part of
    their names; by two where that says too little.
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
