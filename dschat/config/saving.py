"""Flags of checkpoints, failures and logs.

Part of `dschat.config.CommonConfig`.
"""

from dataclasses import dataclass
from typing import Literal, Optional

from dschat.config.fields import flag


@dataclass
class SavingConfig:
    """Checkpoints, failures and logging."""

    # checkpoints
    save_steps: int = flag(
        50,
        "Save a checkpoint every N optimizer steps; 0: never, and a signal then stops the step "
        "without saving.",
        ge=0,
        affects="log",
    )
    save_total_limit: int = flag(2, "Number of checkpoints to keep; 0: all.", ge=0, affects="log")
    resume: Optional[str] = flag(
        None,
        "Resume from a checkpoint folder, or from the latest complete checkpoint in OUTPUT_DIR "
        "(latest, or no value; start fresh if there is none). Changed settings are logged and "
        "apply. train.py sets this itself.",
        nargs="?",
        const="latest",
        affects="place",
    )
    # failures
    max_bad_steps: int = flag(
        20,
        "Stop with an error after N consecutive steps with a non-finite loss or gradient.",
        ge=1,
        affects="log",
    )
    # logging
    logging_steps: int = flag(1, "Log metrics every N steps.", ge=1, affects="log")
    enable_tensorboard: bool = flag(
        True, "Write TensorBoard events to OUTPUT_DIR/tensorboard.", affects="log"
    )
    enable_wandb: bool = flag(
        False, "Log to Weights & Biases; needs the [wandb] extra.", affects="log"
    )
    log_level: Literal["debug", "info", "warning", "error"] = flag(
        "info", "Log level.", affects="log"
    )
    disable_tqdm: bool = flag(False, "Disable progress bars.", affects="log")
    local_rank: int = flag(-1, "Set by the launcher; ignored.", affects="place")
