"""dschat: RLHF training in one process, from a Hugging Face checkpoint to a chat model.

Importing this package loads neither torch nor deepspeed; the names below load on first use.
"""

import logging
from importlib import import_module
from typing import Any

from dschat.startup.performance import limit_spinning

limit_spinning()  # NOTE: before torch loads
# On some CPUs bitsandbytes, which peft and accelerate import, misses a kernel, unused here.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

__version__ = "0.2.0"

_EXPORTS = {
    "SFTConfig": "dschat.config",
    "RewardConfig": "dschat.config",
    "RLHFConfig": "dschat.config",
    "UserError": "dschat.config",
    "SamplingParams": "dschat.inference.protocol",
    "DeepSpeedRLHFEngine": "dschat.rlhf.engine",
    "DeepSpeedPPOTrainer": "dschat.rlhf.trainer",
    "Experience": "dschat.rlhf.experience",
    **dict.fromkeys(
        ("SFTTrainer", "RewardTrainer", "DPOTrainer", "PPOTrainer", "GRPOTrainer"),
        "dschat.trainers",
    ),
}
__all__ = sorted(_EXPORTS)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'dschat' has no attribute {name!r}")
