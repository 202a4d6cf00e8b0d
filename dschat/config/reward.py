"""The knobs of rewards: which sources an answer's score is the sum of, and how they are called.

They are part of `dschat.config.RLHFConfig`. It must not know models or how a source is called.
"""

from dataclasses import dataclass
from typing import Literal, Optional

from dschat.config.errors import require
from dschat.config.fields import flag


@dataclass
class RewardSourcesConfig:
    """Where the scores of step 3 come from."""

    reward_model_name_or_path: str = flag(
        "",
        "The reward model (step 2's folder); default: --critic_model_name_or_path, unless "
        "--reward_fn or --reward_url scores: then it scores only if it is named here. With another "
        "tokenizer than the actor's it reads the text anew, and the critic starts as the actor.",
    )
    reward_model_weight: float = flag(1.0, "What the reward model's score is multiplied by.")
    reward_fn: Optional[list[str]] = flag(
        None,
        "Python functions that score, as file.py:name, pkg.mod:name or a ready-made name, each "
        "with :WEIGHT if not 1 (0: only logged). Ready-made: exact_match, math_equal, regex_match, "
        "length, json_schema, format_tags.",
    )
    reward_args: Optional[list[str]] = flag(
        None,
        "Arguments of those functions, as NAME.KEY=VALUE (as in YAML): length.target=64; or "
        "NAME.KEY=@COLUMN for a column of the data.",
    )
    reward_url: Optional[str] = flag(
        None, "HTTP endpoint that scores: POST of JSON with prompts and answers; docs/rewards.md."
    )
    reward_url_weight: float = flag(1.0, "What the endpoint's score is multiplied by.")
    reward_url_batch_size: int = flag(64, "Samples per request.")
    reward_retries: int = flag(3, "Requests repeated after a failure, with growing pauses.")
    reward_timeout_s: float = flag(60.0, "Seconds that one call of a function or request may take.")
    reward_pool: Literal["none", "thread", "process"] = flag(
        "none",
        "Where functions run: in turn, or beside generation and scoring in threads (for those that "
        "wait) or processes (for those that compute). Coroutines and requests are always beside.",
    )
    reward_workers: int = flag(4, "Threads or processes of --reward_pool, per process.")
    on_reward_error: Literal["error", "skip"] = flag(
        "error",
        "What fails ends the run, or is asked again for one sample at a time, and costs those that "
        "fail then (counted).",
    )
    normalize_reward: bool = flag(
        False, "Shift and scale each source by its running mean and standard deviation."
    )
    clip_reward: Optional[float] = flag(
        None,
        "Clip the weighted sum of the scores to +- this, before penalties and KL; default: 5 where "
        "a reward model alone scores, else as it is.",
        aliases=["--clip_reward_value"],
    )
    eval_pass_score: float = flag(1.0, "An answer passes that scores so much, before clipping.")
    eval_pass_source: Optional[str] = flag(
        None,
        "The source by whose own score an answer passes: a function's name, http or reward_model; "
        "default: the weighted sum.",
    )

    @property
    def has_reward_programs(self) -> bool:
        """Whether anything but a reward model scores."""
        return bool(self.reward_fn or self.reward_url)

    def clip_where(self, model_alone: bool) -> Optional[float]:
        """What bounds the weighted sum, None where nothing does. ``model_alone``: all other sources
        have no weight. Functions given in Python are none of these knobs, so the caller says it.
        """
        return 5.0 if self.clip_reward is None and model_alone else self.clip_reward

    def validate_rewards(self) -> None:
        """Raise ``UserError`` (flag and remedy in one line) for the first knob that cannot work."""
        for name in ("reward_workers", "reward_url_batch_size"):
            value = getattr(self, name)
            require(value >= 1, f"--{name} {value} must be at least 1")
        require(
            self.reward_retries >= 0, f"--reward_retries {self.reward_retries} must not be negative"
        )
        for name in ("clip_reward", "reward_timeout_s"):
            value = getattr(self, name)
            require(value is None or value > 0, f"--{name} {value} must be positive")
        url = self.reward_url
        require(
            url is None or url.startswith(("http://", "https://")),
            f"--reward_url {url} must begin with http:// or https://",
        )
