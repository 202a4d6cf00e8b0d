"""Training checkpoints, and Hugging Face export of models.

A checkpoint is a folder, complete or absent. `manifest` identifies and compares checkpoints (no
torch needed), `atomic_files` writes files that survive a power cut, `snapshot` copies state to host
memory, `deepspeed_state` and `rng_state` capture and restore state, `async_writer` writes in the
background; `manager` combines them.

The names below load on first use: looking for a checkpoint imports no torch.
"""

from importlib import import_module
from typing import Any

_EXPORTS = {
    "MAX_FILE_BYTES": "dschat.checkpoint.hf_export",
    "export_adapter": "dschat.checkpoint.hf_export",
    "export_hf": "dschat.checkpoint.hf_export",
    "CheckpointInfo": "dschat.checkpoint.manifest",
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
