"""Every flag of every command: dataclasses, their validation, and the command-line parser.

Every ``validate`` raises `UserError` for the first invalid flag: one line with the flag and the
remedy.

Imports the standard library only, except ``parser``: yaml.
"""

from dschat.config.errors import UserError
from dschat.config.rlhf import RLHFConfig
from dschat.config.steps import (
    CommonConfig,
    RewardConfig,
    SFTConfig,
    SupervisedConfig,
)

__all__ = [
    "CommonConfig",
    "RLHFConfig",
    "RewardConfig",
    "SFTConfig",
    "SupervisedConfig",
    "UserError",
]
