"""Flags of what is learned: the RL algorithm (advantages, losses, KL, dynamic sampling, off-policy
correction), on-policy distillation, and the loss on preference pairs.

Parts of `dschat.config.RLHFConfig`; `PreferenceConfig` of `dschat.config.RewardConfig`.
"""

import re
from dataclasses import dataclass
from typing import Literal, Optional, Union

from dschat.config.errors import require
from dschat.config.fields import flag, speed_flag

Estimator = Literal[
    "gae", "grpo", "dr_grpo", "rloo", "reinforce", "reinforce_pp", "reinforce_pp_baseline"
]
# Estimators whose papers put the KL penalty in the loss; the others put it in the reward.
_KL_IN_LOSS = ("grpo", "dr_grpo", "reinforce_pp_baseline")
# Estimators that compare several answers to the same prompt.
GROUPED = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline")
# Clip ranges below and above 1, by --policy_loss.
CLIPRANGES = {"ppo": (0.2, 0.2), "gspo": (3e-4, 4e-4), "cispo": (1.0, 4.0)}


@dataclass
class AlgorithmConfig:
    """Algorithm: how the rewards of a rollout become a loss."""

    advantage_estimator: Union[Estimator, str] = flag(
        "gae",
        "Baseline of the advantages: a critic (gae, PPO), the other answers to the prompt (grpo, "
        "dr_grpo, rloo, reinforce_pp_baseline), the batch (reinforce_pp), or none (reinforce); or "
        "a function of yours, file.py:NAME.",
        short=True,
        reads="files",
    )
    ppo_epochs: int = flag(1, "Passes over each rollout.", ge=1)
    gamma: float = flag(1.0, "Discount factor (gae, reinforce, reinforce_pp*).", ge=0, le=1)
    lam: float = flag(0.95, "GAE's lambda.", ge=0, le=1)
    whiten_advantages: bool = flag(
        True, "Whiten gae's advantages over the rollout; reinforce_pp* always do, others never."
    )
    critic_warmup_steps: int = flag(
        0, "Number of initial iterations that train the critic only.", ge=0
    )
    # KL
    kl_coef: float = flag(
        0.1,
        "Weight of the KL penalty; 0 loads no reference model; see --log_kl.",
        short=True,
        aliases=["--kl_ctl"],
        ge=0,
        read_once="set trainer.kl.value",
    )
    log_kl: bool = flag(
        False, "Load the reference model with --kl_coef 0 too, and log the KL to it."
    )
    kl_in_loss: Optional[bool] = flag(
        None,
        "Put the KL penalty in the loss, not in the reward; default: true for grpo, dr_grpo and "
        "reinforce_pp_baseline.",
    )
    kl_estimator: Optional[Literal["k1", "k2", "k3"]] = flag(
        None,
        "Estimator of the per-token KL (Schulman 2020); default: k1 in the reward, k3 in the loss "
        "(k2 for reinforce_pp_baseline).",
    )
    kl_target: Optional[float] = flag(
        None,
        "Adapt --kl_coef to reach this KL per sequence, in nats.",
        gt=0,
        remedy="; leave it out for a fixed --kl_coef",
        read_once="set trainer.kl.target",
    )
    kl_horizon: int = flag(
        10_000,
        "Time constant of the adaptive KL controller, in sequences.",
        ge=1,
        needs="kl_target",
        read_once="set trainer.kl.horizon",
    )
    # policy and value loss
    policy_loss: Union[Literal["ppo", "gspo", "cispo"], str] = flag(
        "ppo",
        "Clip token ratios (ppo), sequence ratios (gspo), or detached weights (cispo); or a "
        "function of yours, file.py:NAME.",
        reads="files",
    )
    cliprange: Optional[list[float]] = flag(
        None,
        "Clip range of the probability ratio, below and above 1, or one number for both sides; "
        "default: 0.2 for ppo, 3e-4 4e-4 for gspo, 1 4 for cispo.",
        gt=0,
    )
    dual_clip: Optional[float] = flag(
        None,
        "Dual-clip PPO: bound of the ratio where the advantage is negative; above 1.",
        gt=1,
        remedy=" (3 is usual); leave it out for none",
    )
    loss_aggregation: Literal["auto", "token", "sequence", "constant"] = flag(
        "auto",
        "token: mean over all tokens. sequence: mean of per-sequence means. constant: mean of "
        "per-sequence sums / --max_answer_seq_len. auto: constant for dr_grpo, sequence for gspo, "
        "else token.",
    )
    entropy_coef: float = flag(0.0, "Weight of the entropy bonus.", ge=0)
    cliprange_value: float = flag(0.2, "Clip range of values around the old values.", gt=0)
    # truncated and long answers
    missing_eos_penalty: float = flag(0.0, "Score penalty of an answer without EOS.")
    overlong_buffer_len: int = flag(
        0,
        "Soft overlong punishment (DAPO): penalize the last N tokens of --max_answer_seq_len.",
        ge=0,
    )
    overlong_penalty: float = flag(
        1.0,
        "Penalty of an answer of full length, reached linearly (DAPO).",
        ge=0,
        needs="overlong_buffer_len",
    )
    overlong_filter: bool = flag(False, "Mask answers without EOS out of the loss (DAPO).")
    # which prompts
    prompt_sampling: str = flag(
        "uniform",
        "How prompts are drawn. uniform: all in turn. adaptive: more often where the scores of a "
        "prompt's answers have differed. curriculum:COLUMN: by ascending numbers in COLUMN.",
    )
    dynamic_sampling: bool = flag(
        False,
        "Drop groups whose scores are all equal and sample until the rollout is full (DAPO).",
    )
    max_sampling_rounds: int = flag(
        10, "Maximum rounds of --dynamic_sampling per iteration.", ge=1, needs="dynamic_sampling"
    )
    # mismatch between rollout and training probabilities
    old_logprobs: Literal["auto", "recompute", "rollout"] = flag(
        "auto",
        "Old log-probs of the ratio and the KL: recomputed by the training model, the rollout's "
        "own, or auto: the rollout's where an eighth of the answers, recomputed, agrees.",
    )
    rollout_is: Literal["off", "tis", "icepop"] = flag(
        "off",
        "Importance weights, training / rollout probability, per token: truncated at "
        "the end of --rollout_is_range (tis), or masked outside it (icepop).",
    )
    rollout_is_range: Optional[list[float]] = flag(
        None,
        "Smallest importance weight that icepop keeps, and the largest that both keep; default: "
        "0.5 2 for tis, 0.5 5 for icepop.",
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
    def kl_by(self) -> Literal["k1", "k2", "k3"]:
        if self.kl_estimator or not self.kl_is_in_loss:
            return self.kl_estimator or "k1"
        return "k2" if self.advantage_estimator == "reinforce_pp_baseline" else "k3"

    @property
    def needs_reference(self) -> bool:
        """Whether a reference model is needed: for the KL penalty, or to log the KL."""
        return self.kl_coef > 0 or self.kl_target is not None or self.log_kl

    @property
    def cliprange_sides(self) -> tuple[float, float]:
        """Clip range of the ratio (below 1, above 1)."""
        given = self.cliprange or CLIPRANGES.get(self.policy_loss, CLIPRANGES["ppo"])
        return given[0], given[-1]

    @property
    def aggregation(self) -> Literal["token", "sequence", "constant"]:
        if self.loss_aggregation != "auto":
            return self.loss_aggregation
        if self.policy_loss == "gspo":
            return "sequence"
        return "constant" if self.advantage_estimator == "dr_grpo" else "token"

    @property
    def importance_range(self) -> tuple[float, float]:
        """Importance weights that are used unchanged: (smallest, largest)."""
        is_icepop = self.rollout_is == "icepop"
        low, high = self.rollout_is_range or (0.5, 5.0 if is_icepop else 2.0)
        return (low if is_icepop else 0.0, high)

    def validate_algorithm(self, num_samples_per_prompt: int, max_answer_seq_len: int) -> None:
        low, num_sides = self.cliprange_sides[0], len(self.cliprange or (0, 0))
        require(
            num_sides == 2 or (num_sides == 1 and self.policy_loss == "ppo"),
            f"--cliprange {' '.join(map(str, self.cliprange or ()))}: give two numbers, the ranges "
            "below and above 1, or leave it out; one number, for both, is for --policy_loss ppo",
        )
        require(low <= 1, f"--cliprange {low} below 1 must be at most 1: a ratio is never negative")
        require(
            self.dual_clip is None or self.policy_loss == "ppo",
            f"--dual_clip is for --policy_loss ppo; leave it out with {self.policy_loss}",
        )
        require(
            not (self.kl_is_in_loss and self.kl_by == "k1" and self.kl_coef > 0),
            "--kl_estimator k1 has zero expected gradient in the loss; choose k2 or k3",
        )
        require(
            self.kl_target is None or self.kl_coef > 0,
            "--kl_target adapts --kl_coef, which is 0 and would stay 0; set it, e.g. to 0.1",
        )
        name = self.advantage_estimator
        for given, compares in (
            (f"--advantage_estimator {name}", name in GROUPED),
            ("--dynamic_sampling", self.dynamic_sampling),
            ("--prompt_sampling adaptive", self.prompt_sampling == "adaptive"),
        ):
            require(
                not compares or num_samples_per_prompt > 1,
                f"{given} compares the answers to one prompt; raise "
                f"--num_samples_per_prompt {num_samples_per_prompt} to 2 or more",
            )
        require(
            bool(re.fullmatch("uniform|adaptive|curriculum:.+", self.prompt_sampling)),
            f"--prompt_sampling {self.prompt_sampling!r}: uniform, adaptive or curriculum:COLUMN",
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
            self.rollout_is == "off" or self.old_logprobs != "rollout",
            f"--rollout_is {self.rollout_is} needs --old_logprobs recompute: with the rollout's "
            "log-probs the ratio already includes the correction",
        )
        weights = self.rollout_is_range or (0.5, 2.0)
        require(
            len(weights) == 2 and 0 <= weights[0] < 1 <= weights[1],
            f"--rollout_is_range {' '.join(map(str, weights))} must be two numbers, in [0, 1) and "
            "at least 1: the weight of equal probabilities is 1",
        )


@dataclass
class DistillationConfig:
    """On-policy distillation: learn from a teacher's log-probs of the actor's own answers."""

    teacher_model_name_or_path: str = flag(
        "",
        "Teacher: a causal LM of any size with the actor's tokenizer. Its log-probs of the actor's "
        "answers are learned from, without or in addition to rewards.",
    )
    distill_coef: float = flag(
        1.0,
        "Weight of the reverse KL to the teacher in the advantages.",
        ge=0,
        needs="teacher_model_name_or_path",
    )
    distill_gamma: float = flag(
        0.0,
        "Discount of later tokens' KL to the teacher; 0: a token's own KL only, 1: the answer's "
        "from the token on.",
        ge=0,
        le=1,
        needs="teacher_model_name_or_path",
    )
    distill_top_k: int = flag(
        0,
        "Put the KL to the teacher in the loss, over the N likeliest tokens of the teacher and "
        "of the actor at each position; 0: in the advantage of the sampled token.",
        ge=0,
        needs="teacher_model_name_or_path",
    )

    @property
    def has_teacher(self) -> bool:
        return bool(self.teacher_model_name_or_path)

    def validate_distillation(self) -> None:
        require(
            self.distill_top_k == 0 or self.has_teacher,
            f"--distill_top_k {self.distill_top_k} needs --teacher_model_name_or_path",
        )
        require(
            self.distill_top_k == 0 or self.distill_gamma == 0,
            f"--distill_gamma {self.distill_gamma} is for the KL of sampled tokens; leave it out, "
            "or --distill_top_k",
        )

    def validate_teacher_alone(self, estimator: str, dynamic_sampling: bool) -> None:
        """Raise ``UserError`` for a flag that needs rewards, where the teacher is all there is."""
        only = "--teacher_model_name_or_path without a reward model or function"
        require(
            estimator != "gae",
            f"{only} has nothing for a critic to learn; pass --advantage_estimator reinforce",
        )
        require(
            not dynamic_sampling,
            f"{only} scores all answers alike, and --dynamic_sampling drops those; leave it out",
        )
        require(
            self.distill_coef > 0,
            f"{only} and with --distill_coef 0 has nothing to learn; raise it, e.g. to 1",
        )


# flag -> the losses that use it
_LOSSES = {
    "beta": ("dpo", "cdpo", "ipo", "kto"),
    "label_smoothing": ("dpo", "cdpo"),
    "kto_desirable_weight": ("kto",),
    "kto_undesirable_weight": ("kto",),
    "precompute_ref_logprobs": ("dpo", "cdpo", "ipo", "kto"),
}


@dataclass
class PreferenceConfig:
    """Loss on pairs."""

    loss: Literal["pairwise", "dpo", "cdpo", "ipo", "kto"] = flag(
        "pairwise",
        "pairwise: train a reward model for step 3. Others: train the policy (step 1's causal LM) "
        "on the pairs, in place of step 3; dropout is off unless --dropout is given.",
        short=True,
    )
    beta: Optional[float] = flag(
        None,
        "Strength of the KL constraint of dpo, cdpo and kto; of ipo (tau): train up to a margin of "
        "1 / (2 beta) nats, so that dpo's larger values learn little; default: 0.1.",
        short=True,
        gt=0,
    )
    label_smoothing: Optional[float] = flag(
        None,
        "Assumed share of wrong labels; default: 0.1 for cdpo, else 0.",
        ge=0,
        lt=0.5,
        remedy=": with half of the labels wrong, pairs carry no information",
    )
    kto_desirable_weight: Optional[float] = flag(
        None, "Weight of chosen answers in kto; default: 1.", ge=0
    )
    kto_undesirable_weight: Optional[float] = flag(
        None, "Weight of rejected answers in kto; default: 1.", ge=0
    )
    precompute_ref_logprobs: bool = speed_flag(
        False,
        "Compute reference log-probs with the policy before the first step, and load no reference "
        "model.",
    )

    @property
    def trains_policy(self) -> bool:
        return self.loss != "pairwise"

    @property
    def used_beta(self) -> float:
        return 0.1 if self.beta is None else self.beta

    @property
    def used_label_smoothing(self) -> float:
        if self.label_smoothing is None:
            return 0.1 if self.loss == "cdpo" else 0.0
        return self.label_smoothing

    @property
    def kto_weights(self) -> tuple[float, float]:
        """Weights of (chosen, rejected) answers."""
        given = (self.kto_desirable_weight, self.kto_undesirable_weight)
        return tuple(1.0 if weight is None else weight for weight in given)  # type: ignore[return-value]

    def validate_preferences(self, streaming: bool) -> None:
        for name, losses in _LOSSES.items():
            require(
                getattr(self, name) in (None, False) or self.loss in losses,
                f"--{name} is not used by --loss {self.loss}; leave it out, or choose --loss "
                f"{' or '.join(losses)}",
            )
        for option, given in (
            ("--loss kto", self.loss == "kto"),
            ("--precompute_ref_logprobs", self.precompute_ref_logprobs),
        ):
            require(
                not (streaming and given),
                f"{option} reads all pairs before training; leave --streaming out",
            )
