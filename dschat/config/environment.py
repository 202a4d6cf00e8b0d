"""Flags of environments: episodes of several turns. Part of `dschat.config.RLHFConfig`."""

from dataclasses import dataclass
from typing import Literal, Optional

from dschat.config.errors import require
from dschat.config.fields import flag
from dschat.config.reward import RewardTrainingConfig
from dschat.config.rollout import RolloutConfig


@dataclass
class EnvironmentConfig(RewardTrainingConfig, RolloutConfig):
    """Environments."""

    environment: Optional[str] = flag(
        None,
        "Answer in several turns with an environment: file.py:NAME or pkg.mod:NAME, a class with "
        "step(answer) or a function step(observation, action); its rewards are a reward source.",
    )
    max_turns: int = flag(8, "Longest episode with --environment, in answers.", ge=1)
    max_turn_tokens: Optional[int] = flag(
        None, "Longest answer of one turn, in tokens; default: --max_answer_seq_len.", ge=1
    )
    environment_timeout_s: float = flag(
        60.0, "Timeout of one step of an environment, in seconds.", gt=0
    )
    environment_workers: int = flag(16, "Threads per process that run steps of environments.", ge=1)
    environment_lag: int = flag(
        4,
        "Decode steps after which a reply is awaited, so that a run repeats to the bit; 0: take "
        "replies as they come, for slow environments.",
        ge=0,
    )
    on_environment_error: Literal["error", "feedback"] = flag(
        "error",
        "error: stop the run. feedback: tell the model what failed, and go on with the episode.",
    )

    @property
    def has_reward_programs(self) -> bool:
        """Whether functions, an endpoint or an environment score."""
        return self.environment is not None or super().has_reward_programs

    def validate_rewards(self) -> None:
        """Raise ``UserError`` for the first invalid flag: one line with the flag and the remedy."""
        super().validate_rewards()
        for flag_name, excludes in (
            ("--partial_rollout", self.partial_rollout),
            ("--inference_tp_size above 1", self.inference_tp_size > 1),
            ("--no_enable_hybrid_engine", not self.enable_hybrid_engine),
        ):
            require(
                self.environment is None or not excludes,
                f"{flag_name} and --environment exclude each other: leave one out",
            )
