"""Flags of checkpoints, failures and logs.

Part of `dschat.config.CommonConfig`.
"""

from dataclasses import dataclass
from typing import Literal, Optional

from dschat.config.fields import log_flag, place_flag


@dataclass
class SavingConfig:
    """Checkpoints, failures and logging."""

    # checkpoints
    save_steps: int = log_flag(
        50,
        "Save a checkpoint every N optimizer steps; 0: never, and a signal then stops the step "
        "without saving.",
        ge=0,
    )
    save_total_limit: int = log_flag(2, "Number of checkpoints to keep; 0: all.", ge=0)
    resume: Optional[str] = place_flag(
        None,
        "Resume from a checkpoint folder, or from the latest complete checkpoint in OUTPUT_DIR "
        "(latest, or no value; start fresh if there is none). Changed settings are logged and "
        "apply. train.py sets this itself.",
        nargs="?",
        const="latest",
    )
    # failures
    max_bad_steps: int = log_flag(
        20, "Stop with an error after N consecutive steps with a non-finite loss or gradient.", ge=1
    )
    # logging
    logging_steps: int = log_flag(1, "Log metrics every N steps.", ge=1)
    enable_tensorboard: bool = log_flag(True, "Write TensorBoard events to OUTPUT_DIR/tensorboard.")
    enable_wandb: bool = log_flag(False, "Log to Weights & Biases; needs the [wandb] extra.")
    log_level: Literal["debug", "info", "warning", "error"] = log_flag("info", "Log level.")
    disable_tqdm: bool = log_flag(False, "Disable progress bars.")
    local_rank: int = place_flag(-1, "Set by the launcher; ignored.")
