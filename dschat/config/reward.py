"""Flags of the reward sources, and of their weights: reward model, Python functions, environments.

Part of `dschat.config.RLHFConfig`; ``dschat generate`` and ``dschat eval`` have the sources too.
The score of an answer is the weighted sum of its sources.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, Optional

from dschat.config.errors import require
from dschat.config.fields import flag, log_flag, speed_flag
from dschat.config.rollout import RolloutConfig

# Columns of a row's right answer; the first of them that the data has counts.
REFERENCE = ("reference", "solution", "answer", "target", "ground_truth")


@dataclass
class RewardSourcesConfig:
    """Reward sources."""

    reward_model_name_or_path: str = flag(
        "",
        "Reward model (step 2's folder); default: --critic_model_name_or_path, or none with "
        "--reward_fn. If its tokenizer is not the actor's, answers are retokenized and the critic "
        "starts from the actor.",
        short=True,
    )
    reward_model_weight: float = flag(
        1.0, "Weight of the reward model's score.", needs="reward_model_name_or_path"
    )
    reward_fn: Optional[list[str]] = flag(
        None,
        "Python reward functions: file.py:name, pkg.mod:name, or exact_match, math_equal, "
        "regex_match, length, format_tags, python_tests, reasoning_gym, http, judge, judge_group, "
        "judge_reference; append :WEIGHT (0: only log).",
        short=True,
        reads="files",
    )
    reward_args: Optional[list[str]] = flag(
        None,
        "Arguments of --reward_fn: NAME.KEY=VALUE in YAML syntax (length.target=64), or "
        "NAME.KEY=@COLUMN for a column of the data.",
        needs="reward_fn",
    )
    reward_timeout_s: float = log_flag(60.0, "Timeout of one function call, in seconds.", gt=0)
    reward_pool: Literal["none", "thread", "process"] = speed_flag(
        "none",
        "Run functions in the training process (none), or concurrently with generation in threads "
        "(I/O bound) or processes (CPU bound). Coroutines are always concurrent.",
    )
    reward_workers: int = speed_flag(4, "Workers of --reward_pool per process.", ge=1)
    on_reward_error: Literal["error", "skip"] = flag(
        "error",
        "error: stop the run. skip: retry sample by sample, drop samples that still fail (logged "
        "as rollout/unscored).",
    )

    @property
    def has_reward_functions(self) -> bool:
        """Whether functions score."""
        return bool(self.reward_fn)


@dataclass
class RewardTrainingConfig(RewardSourcesConfig):
    """Rewards in training."""

    normalize_reward: bool = flag(
        False, "Normalize each source by its running mean and standard deviation."
    )
    clip_reward: Optional[float] = flag(
        None,
        "Clip the weighted sum of scores to +- this, before penalties and KL; default: 5 with a "
        "reward model alone, else none.",
        aliases=["--clip_reward_value"],
        gt=0,
    )
    eval_pass_score: Optional[float] = log_flag(
        None,
        "Score at which an answer counts as passed in evaluation, before clipping; default: 1, for "
        "scores that are 0 or 1.",
    )
    eval_pass_source: Optional[str] = flag(
        None,
        "Source whose score decides passing: a function's name or reward_model; default: the "
        "weighted sum.",
    )

    @property
    def sets_passing(self) -> bool:
        """Whether a flag says which answers pass in evaluations."""
        return self.eval_pass_score is not None or bool(self.eval_pass_source)

    def clip_where(self, model_alone: bool) -> Optional[float]:
        """The bound of the weighted sum; None: unbounded. ``model_alone``: all other sources have
        weight 0. The caller passes it because reward functions can also be given in Python.
        """
        return 5.0 if self.clip_reward is None and model_alone else self.clip_reward


@dataclass
class EnvironmentConfig(RewardTrainingConfig, RolloutConfig):
    """Environments."""

    environment: Optional[str] = flag(
        None,
        "Answer in several turns with an environment: file.py:NAME or pkg.mod:NAME, a class with "
        "step(answer) or with methods that are tools, or a function step(observation, action); or "
        "verifiers:NAME, of that library. Its rewards are a reward source.",
        reads="files",
    )
    tools: Optional[list[str]] = flag(
        None,
        "Functions that the model may call as the chat template shows it: file.py:NAME[,NAME...], "
        "pkg.mod:NAME[,NAME...], or 'mcp:COMMAND', which starts an MCP server. An answer without a "
        "call ends the episode.",
        nargs="+",
        reads="files",
    )
    agent: Optional[str] = flag(
        None,
        "Train the model of an agent that talks to an OpenAI endpoint: file.py:NAME or "
        "pkg.mod:NAME of async run(client, prompt, **columns), or a command. What it returns is a "
        "reward source.",
        reads="files",
    )
    agent_sampling: Literal["as_trained", "free"] = flag(
        "as_trained",
        "as_trained: refuse an agent's requests for another distribution than training samples "
        "from (temperature, response_format, ...). free: answer them, and do not train on those "
        "answers.",
        needs="agent",
    )
    agent_workers: int = speed_flag(
        64, "Agents that run at once, per training process.", ge=1, needs="agent"
    )
    agent_timeout_s: float = log_flag(
        600.0, "Timeout of one episode of an agent, in seconds.", gt=0, needs="agent"
    )
    agent_max_rows: int = flag(
        16, "Conversations of an agent's episode; one more fails it.", ge=1, needs="agent"
    )
    on_agent_error: Literal["error", "zero", "drop"] = flag(
        "error",
        "error: stop the run. zero: an agent that fails has the reward 0. drop: its episode is "
        "left out (logged as rollout/agent_failures).",
        needs="agent",
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
        named = any(v is not None for v in (self.environment, self.tools, self.agent))
        return named or self.has_python_episodes

    @property
    def agent_spec(self) -> Optional[str]:
        """What names an agent: also an environment of verifiers, which is played by one."""
        named = self.environment or ""
        return named if named.startswith("verifiers:") else self.agent

    # Whether Python objects that no flag names score, too, and whether some make episodes.
    scores_with_objects: ClassVar[bool] = False
    has_python_episodes: ClassVar[bool] = False

    @property
    def has_reward_functions(self) -> bool:
        """Whether functions, an environment or an agent score."""
        named = self.environment is not None or self.agent is not None
        return named or super().has_reward_functions or self.scores_with_objects

    def validate_rewards(self) -> None:
        for flag_name, excludes in (
            ("--partial_rollout", self.partial_rollout),
            ("--no_enable_hybrid_engine", not self.enable_hybrid_engine),
            ("--rollout_backend vllm", self.rollout_backend == "vllm"),
        ):
            require(
                not (self.has_episodes and excludes),
                f"{flag_name} excludes --environment, --tools and --agent: leave one out",
            )
        both = self.environment is not None and self.agent is not None
        require(
            not both and (self.agent_spec is None or self.tools is None),
            "--agent excludes --environment and --tools: an agent runs its own; leave one out",
        )
