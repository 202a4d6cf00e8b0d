"""Records every start of a step in ``OUTPUT_DIR/starts.jsonl``: when, from which step, on what.

The file is only appended to, so it shows what a run went through: resumes, restarts, versions.
"""

import json
import logging
import platform
import time
from importlib import metadata
from pathlib import Path
from typing import Literal

import dschat.distributed as dist
from dschat import __version__
from dschat.startup.files import no_link

logger = logging.getLogger("dschat")

STARTS = "starts.jsonl"
Event = Literal["start", "resume", "restart"]
_LIBRARIES = ("torch", "deepspeed", "transformers", "datasets", "peft", "numpy")


def record_start(folder: Path, event: Event, step: int) -> None:
    """Append one row; ``step``: the one that training continues from, 0 at the start.

    A disk that is full costs the row, not the run.
    """
    row = {
        "event": event,
        "step": step,
        "time": time.time(),
        "processes": dist.world_size(),
        "device": device_name(),
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


def device_name() -> str:
    import torch

    device = dist.device()
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
