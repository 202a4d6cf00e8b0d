"""Flags of environments: episodes of several turns. Part of `dschat.config.RLHFConfig`."""

from dataclasses import dataclass
from typing import Literal, Optional

from dschat.config.errors import require
from dschat.config.fields import flag, log_flag, speed_flag
from dschat.config.reward import RewardTrainingConfig
from dschat.config.rollout import RolloutConfig


@dataclass
class EnvironmentConfig(RewardTrainingConfig, RolloutConfig):
    """Environments."""

    environment: Optional[str] = flag(
        None,
        "Answer in several turns with an environment: file.py:NAME or pkg.mod:NAME, a class with "
        "step(answer) or with methods that are tools, or a function step(observation, action); its "
        "rewards are a reward source.",
        reads="files",
    )
    tools: Optional[list[str]] = flag(
        None,
        "Functions that the model may call as the chat template shows it: file.py:NAME[,NAME...] "
        "or pkg.mod:NAME[,NAME...]. An answer without a call ends the episode.",
        nargs="+",
        reads="files",
    )
    max_turns: int = flag(8, "Longest episode with --environment or --tools, in answers.", ge=1)
    max_turn_tokens: Optional[int] = flag(
        None, "Longest answer of one turn, in tokens; default: --max_answer_seq_len.", ge=1
    )
    environment_timeout_s: float = log_flag(
        60.0, "Timeout of one step of an environment, in seconds.", gt=0
    )
    environment_pool: Literal["thread", "process"] = speed_flag(
        "thread",
        "Where environments and tools run. process: worker processes, for steps that compute, or "
        "that may hang for good: then their process is killed.",
    )
    environment_workers: int = speed_flag(
        16, "Workers of --environment_pool per training process.", ge=1
    )
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
    on_tool_error: Literal["error", "feedback"] = flag(
        "feedback",
        "feedback: a tool that fails is an error message to the model. error: it fails the step.",
    )

    @property
    def has_episodes(self) -> bool:
        """Whether answers may have several turns."""
        return self.environment is not None or self.tools is not None

    @property
    def has_reward_functions(self) -> bool:
        """Whether functions, an endpoint or an environment score."""
        return self.environment is not None or super().has_reward_functions

    def validate_rewards(self) -> None:
        super().validate_rewards()
        for flag_name, excludes in (
            ("--partial_rollout", self.partial_rollout),
            ("--no_enable_hybrid_engine", not self.enable_hybrid_engine),
        ):
            require(
                not (self.has_episodes and excludes),
                f"{flag_name} excludes --environment and --tools: leave one out",
            )
