"""The knobs of learning from rewards: advantages, losses, KL, DAPO's sampling, the rollout's gap.

They are part of `dschat.config.RLHFConfig`. It must not know models, memory or the file system.
"""

from dataclasses import dataclass
from typing import Literal, Optional

from dschat.config.errors import require
from dschat.config.fields import flag

# Estimators whose papers put the KL into the loss; the others have it in the reward.
_KL_IN_LOSS = ("grpo", "dr_grpo", "reinforce_pp_baseline")
# Estimators that compare the answers to one prompt.
GROUPED = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline")


@dataclass
class AlgorithmConfig:
    """How step 3 learns from the rewards of a rollout."""

    advantage_estimator: Literal[
        "gae", "grpo", "dr_grpo", "rloo", "reinforce", "reinforce_pp", "reinforce_pp_baseline"
    ] = flag(
        "gae",
        "Where advantages come from: a critic (gae, PPO), the other answers to the prompt (grpo, "
        "dr_grpo, rloo, reinforce_pp_baseline), or the batch (reinforce_pp); reinforce: none.",
    )
    ppo_epochs: int = flag(1, "Passes over each experience.")
    gamma: float = flag(1.0, "Discount factor (gae, reinforce, reinforce_pp*).")
    lam: float = flag(0.95, "GAE's lambda.")
    whiten_advantages: bool = flag(
        True, "Whiten gae's advantages over the experience; reinforce_pp* always do, others never."
    )
    critic_warmup_steps: int = flag(0, "First iterations that train the critic only.")
    # KL
    kl_coef: float = flag(
        0.1,
        "Weight of the KL penalty; 0 (without --kl_target): no reference model is loaded.",
        aliases=["--kl_ctl"],
    )
    kl_in_loss: Optional[bool] = flag(
        None,
        "KL penalty in the loss, not in the reward; default: with grpo, dr_grpo and "
        "reinforce_pp_baseline.",
    )
    kl_estimator: Optional[Literal["k1", "k2", "k3"]] = flag(
        None,
        "Estimator of the per-token KL (Schulman 2020); default: k1 in the reward, k3 in the loss "
        "(k2 with reinforce_pp_baseline).",
    )
    kl_target: Optional[float] = flag(
        None, "Adapt --kl_coef towards this KL per sequence, in nats."
    )
    kl_horizon: int = flag(10_000, "Time constant of the adaptive KL controller, in sequences.")
    # the policy's loss
    policy_loss: Literal["ppo", "gspo", "cispo"] = flag(
        "ppo", "PPO's clipped ratio of tokens, GSPO's of sequences, or CISPO's clipped weight."
    )
    cliprange: Optional[float] = flag(
        None, "PPO's clip range of the probability ratio, on both sides; default: 0.2."
    )
    cliprange_low: Optional[float] = flag(
        None, "How far below 1 the ratio may go; default: --cliprange; gspo 3e-4, cispo 1."
    )
    cliprange_high: Optional[float] = flag(
        None, "How far above 1 the ratio may go; default: --cliprange; gspo 4e-4, cispo 4."
    )
    dual_clip: Optional[float] = flag(
        None, "Bound the loss of a bad action at this multiple of its advantage (above 1)."
    )
    loss_aggregation: Literal["auto", "token", "sequence", "constant"] = flag(
        "auto",
        "Mean over the step's tokens; over sequences of their means; or over sequences of sums "
        "over --max_answer_seq_len. auto: constant with dr_grpo, sequence with gspo, else token.",
    )
    entropy_coef: float = flag(0.0, "Weight of the entropy bonus.")
    cliprange_value: float = flag(0.2, "Clip range of the value function around its old value.")
    # answers that ran out of room
    missing_eos_penalty: float = flag(0.0, "Subtracted from the score of an answer without EOS.")
    overlong_buffer_len: int = flag(
        0, "Last tokens of --max_answer_seq_len that cost, rising to --overlong_penalty (DAPO)."
    )
    overlong_penalty: float = flag(1.0, "Score that an answer of full length loses (DAPO).")
    overlong_filter: bool = flag(False, "Learn nothing from answers without EOS (DAPO).")
    # dynamic sampling
    dynamic_sampling: bool = flag(
        False,
        "Sample on until the rollout is full of groups whose scores differ (DAPO); others teach "
        "nothing.",
    )
    max_sampling_rounds: int = flag(10, "Rounds of --dynamic_sampling in one iteration, at most.")
    # what the generator computed otherwise than training
    old_logprobs: Literal["recompute", "rollout"] = flag(
        "recompute",
        "Log-probs that the ratio starts from: training's, recomputed, or the rollout's.",
    )
    rollout_is: Literal["off", "tis", "icepop"] = flag(
        "off",
        "Weigh tokens by training's / the rollout's probability: truncated at --rollout_is_max "
        "(tis), or dropped outside of [--rollout_is_min, --rollout_is_max] (icepop).",
    )
    rollout_is_min: float = flag(0.5, "Smallest weight that icepop keeps.")
    rollout_is_max: Optional[float] = flag(
        None, "Largest weight; default: 2 with tis, 5 with icepop."
    )

    @property
    def has_critic(self) -> bool:
        return self.advantage_estimator == "gae"

    @property
    def kl_is_in_loss(self) -> bool:
        if self.kl_in_loss is None:
            return self.advantage_estimator in _KL_IN_LOSS
        return self.kl_in_loss

    @property
    def kl_by(self) -> str:
        """The KL estimator: k1, k2 or k3."""
        if self.kl_estimator or not self.kl_is_in_loss:
            return self.kl_estimator or "k1"
        return "k2" if self.advantage_estimator == "reinforce_pp_baseline" else "k3"

    @property
    def needs_reference(self) -> bool:
        """Whether anything depends on the KL to the reference."""
        return self.kl_coef > 0 or self.kl_target is not None

    @property
    def cliprange_sides(self) -> tuple[float, float]:
        """How far the ratio may fall below 1, and rise above it."""
        own = {"gspo": (3e-4, 4e-4), "cispo": (1.0, 4.0)}
        both = 0.2 if self.cliprange is None else self.cliprange
        low, high = own.get(self.policy_loss, (both, both))
        return (
            low if self.cliprange_low is None else self.cliprange_low,
            high if self.cliprange_high is None else self.cliprange_high,
        )

    @property
    def aggregation(self) -> str:
        """How token losses become one: token, sequence or constant."""
        if self.loss_aggregation != "auto":
            return self.loss_aggregation
        if self.policy_loss == "gspo":
            return "sequence"
        return "constant" if self.advantage_estimator == "dr_grpo" else "token"

    @property
    def rollout_is_range(self) -> tuple[float, float]:
        """The weights that count as they are."""
        high = self.rollout_is_max or {"icepop": 5.0}.get(self.rollout_is, 2.0)
        return (self.rollout_is_min if self.rollout_is == "icepop" else 0.0, high)

    def validate_learning(self, num_samples_per_prompt: int, max_answer_seq_len: int) -> None:
        """Raise ``UserError`` (flag and remedy in one line) for the first knob that cannot work."""
        for name in ("ppo_epochs", "kl_horizon", "max_sampling_rounds"):
            value = getattr(self, name)
            require(value >= 1, f"--{name} {value} must be at least 1")
        for name in ("kl_coef", "critic_warmup_steps", "entropy_coef", "overlong_buffer_len"):
            value = getattr(self, name)
            require(value >= 0, f"--{name} {value} must not be negative")
        require(0 <= self.gamma <= 1, f"--gamma {self.gamma} must be in [0, 1]")
        require(0 <= self.lam <= 1, f"--lam {self.lam} must be in [0, 1]")
        require(
            self.kl_target is None or self.kl_target > 0,
            f"--kl_target {self.kl_target} must be positive; leave it out for a fixed --kl_coef",
        )
        for name in ("cliprange", "cliprange_value", "cliprange_low", "cliprange_high"):
            value = getattr(self, name)
            require(value is None or value > 0, f"--{name} {value} must be positive")
        require(
            self.cliprange is None or self.policy_loss == "ppo",
            f"--cliprange {self.cliprange} is part of --policy_loss ppo; with {self.policy_loss} "
            "give --cliprange_low and --cliprange_high, or leave it out",
        )
        require(
            self.cliprange_low is None or self.cliprange_low <= 1,
            f"--cliprange_low {self.cliprange_low} must be at most 1: a ratio is never negative",
        )
        require(
            self.dual_clip is None or self.dual_clip > 1,
            f"--dual_clip {self.dual_clip} must be above 1 (3 is usual); leave it out for none",
        )
        require(
            self.dual_clip is None or self.policy_loss == "ppo",
            f"--dual_clip is part of --policy_loss ppo; leave it out with {self.policy_loss}",
        )
        require(
            not (self.kl_is_in_loss and self.kl_by == "k1" and self.kl_coef > 0),
            "--kl_estimator k1 has no gradient towards the reference in the loss; choose k2 or k3",
        )
        require(
            self.kl_target is None or self.kl_coef > 0,
            "--kl_target adapts --kl_coef, which is 0 and would stay 0; begin with 0.1, say",
        )
        name = self.advantage_estimator
        require(
            name not in GROUPED or num_samples_per_prompt > 1,
            f"--advantage_estimator {name} compares the answers to one prompt; raise "
            f"--num_samples_per_prompt {num_samples_per_prompt} to 2 or more",
        )
        require(
            not self.dynamic_sampling or num_samples_per_prompt > 1,
            "--dynamic_sampling compares the answers to one prompt; raise "
            f"--num_samples_per_prompt {num_samples_per_prompt} to 2 or more",
        )
        require(
            self.critic_warmup_steps == 0 or self.has_critic,
            f"--critic_warmup_steps needs a critic; {name} has none",
        )
        require(
            self.overlong_buffer_len < max_answer_seq_len,
            f"--overlong_buffer_len {self.overlong_buffer_len} must be less than "
            f"--max_answer_seq_len {max_answer_seq_len}",
        )
        require(
            self.overlong_penalty >= 0,
            f"--overlong_penalty {self.overlong_penalty} must not be negative",
        )
        low, high = self.rollout_is_range
        require(
            self.rollout_is == "off" or self.old_logprobs == "recompute",
            f"--rollout_is {self.rollout_is} needs --old_logprobs recompute: with the rollout's "
            "the ratio holds the correction already",
        )
        require(
            0 <= self.rollout_is_min < 1 <= high,
            f"--rollout_is_min {self.rollout_is_min} must be in [0, 1) and --rollout_is_max {high} "
            "at least 1: equal probabilities weigh 1",
        )
