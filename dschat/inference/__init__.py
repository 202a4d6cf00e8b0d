"""Text generation without DeepSpeed.

`generators` are what callers see, `requests` what is scheduled and drawn, `model` what computes it,
by `kernels` where they apply; `sampling` has the distributions, `protocol` what all of them share.
The names below load on first use: ``protocol`` alone needs no torch.
"""

from importlib import import_module
from typing import Any

_EXPORTS = {
    "EngineConfig": "dschat.inference.generators.engine_config",
    "InferenceEngine": "dschat.inference.generators.engine",
    "Rollout": "dschat.inference.protocol",
    "SamplingParams": "dschat.inference.protocol",
    "UnsupportedModel": "dschat.inference.model.spec",
    "model_spec": "dschat.inference.model.architectures",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'dschat.inference' has no attribute {name!r}")
