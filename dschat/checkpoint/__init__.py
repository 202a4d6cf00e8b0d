"""What training leaves on disk: models for others (`export`), and everything a run needs to go on.

A checkpoint is a folder, complete or absent. ``manifest`` is how it is recognised, found and
compared (no torch needed); ``files`` writes what a power cut leaves whole; ``snapshot`` copies
state out of training's way; ``engines`` is DeepSpeed's part, ``randoms`` the generators';
``writer`` writes in the background; ``run`` is all of it together. It must not know which step
trains, nor what its counters mean.

The names below load on first use: whoever only looks for a checkpoint imports no torch.
"""

from importlib import import_module
from typing import Any

_EXPORTS = {
    "MAX_FILE_BYTES": "dschat.checkpoint.hf_export",
    "export_adapter": "dschat.checkpoint.hf_export",
    "export_hf": "dschat.checkpoint.hf_export",
    "Found": "dschat.checkpoint.manifest",
    "changed_settings": "dschat.checkpoint.manifest",
    "newest": "dschat.checkpoint.manifest",
    "step_name": "dschat.checkpoint.manifest",
    "read_generators": "dschat.checkpoint.rng_state",
    "read_tensors": "dschat.checkpoint.manager",
    "CheckpointManager": "dschat.checkpoint.manager",
    "RunState": "dschat.checkpoint.manager",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'dschat.checkpoint' has no attribute {name!r}")
