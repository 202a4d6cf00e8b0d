"""Ranks, collectives, failure detection, stop signals, and the memory of this process.

Callers write ``import dschat.distributed as dist``. Importing it does not load torch; the modules
that need it load on the first use of one of their names.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from dschat.distributed.env import device, has_gpu, is_main_process, local_rank, rank, world_size
from dschat.distributed.failure_detector import exit_process

if TYPE_CHECKING:
    from dschat.distributed.collectives import *  # noqa: F403
    from dschat.distributed.process_group import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if not name.startswith("__") and find_spec(f"{__name__}.{name}") is None:  # no submodule
        for module in ("collectives", "process_group"):
            names = vars(import_module(f"{__name__}.{module}"))
            if name in names:
                return names[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
