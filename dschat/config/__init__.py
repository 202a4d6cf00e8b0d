"""Every flag of every command: dataclasses, their validation, and the command-line parser.

Imports the standard library only, except ``parser``: yaml.
"""

from dschat.config.errors import UserError
from dschat.config.steps import (
    CommonConfig,
    RewardConfig,
    RLHFConfig,
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
