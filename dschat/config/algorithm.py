"""Flags of what is learned in step 3: the RL algorithm (advantages, losses, KL, dynamic sampling,
off-policy correction) and on-policy distillation. Parts of `dschat.config.RLHFConfig`.
"""

import re
from dataclasses import dataclass
from typing import Literal, Optional, Union

from dschat.config.errors import require
from dschat.config.fields import flag
from dschat.config.methods import (
    CORRECTIONS,
    ESTIMATORS,
    OWN_ESTIMATOR,
    OWN_POLICY_LOSS,
    POLICY_LOSSES,
    Aggregation,
    Estimator,
    PolicyLoss,
    named,
)


def _by_estimator(fact: str) -> str:
    """``0.1 for gae, 0 for grpo and dr_grpo, else 0.01``: the defaults that rows have."""
    usual = getattr(OWN_ESTIMATOR, fact)
    values = dict.fromkeys(getattr(row, fact) for row in ESTIMATORS.values())
    shown = {v: f"{v:g}" if isinstance(v, float) else v for v in values}
    others = [f"{shown[v]} for {named(ESTIMATORS, fact, v)}" for v in values if v != usual]
    return ", ".join([*others, f"else {shown[usual]}"])


_KL_COEFS = _by_estimator("kl_coef")
RATES, SCHEDULES = _by_estimator("learning_rate"), _by_estimator("schedule")


def _defaults(ranges: dict[str, tuple[float, float]]) -> str:
    shown = {name: " ".join(f"{x:g}" for x in dict.fromkeys(ends)) for name, ends in ranges.items()}
    return ", ".join(f"{ends} for {name}" for name, ends in shown.items())


_CLIPRANGES = _defaults({n: row.cliprange for n, row in POLICY_LOSSES.items() if row.has_range})
_RANGES = _defaults({name: row.range for name, row in CORRECTIONS.items()})


@dataclass
class AlgorithmConfig:
    """Algorithm: how the rewards of a rollout become a loss."""

    advantage_estimator: Union[Literal[tuple(ESTIMATORS)], str] = flag(  # type: ignore[valid-type]
        "gae",
        "Baseline: a critic (gae, PPO), the other answers to the prompt "
        f"({named(ESTIMATORS, 'compares_group')}), the batch (reinforce_pp), or none (reinforce); "
        "or a function of yours, file.py:NAME.",
        short=True,
        reads="files",
    )
    ppo_epochs: int = flag(1, "Passes over each rollout.", ge=1)
    gamma: float = flag(1.0, "Discount factor (gae, reinforce, reinforce_pp*).", ge=0, le=1)
    lam: float = flag(0.95, "GAE's lambda.", ge=0, le=1)
    whiten_advantages: bool = flag(
        True,
        "Whiten gae's advantages over the rollout; the others do as their formulas say.",
    )
    critic_warmup_steps: int = flag(
        0, "Number of initial iterations that train the critic only.", ge=0
    )
    # KL
    kl_coef: Optional[float] = flag(
        None,
        "Weight of the KL penalty; 0 loads no reference model; see --log_kl. "
        f"Default: {_KL_COEFS}.",
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
        "Put the KL penalty in the loss, not in the reward; default: true for "
        f"{named(ESTIMATORS, 'kl_in_loss')}.",
    )
    kl_estimator: Optional[Literal["k1", "k2", "k3"]] = flag(
        None,
        "Estimator of the per-token KL (Schulman 2020); default: k1 in the reward, k3 in the loss "
        f"(k2 for {named(ESTIMATORS, 'kl_of_loss', 'k2')}).",
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
    policy_loss: Union[Literal[tuple(POLICY_LOSSES)], str] = flag(  # type: ignore[valid-type]
        "ppo",
        "Clip token ratios (ppo), sequence ratios (gspo), or detached weights (cispo), gate them "
        "softly (sapo), or leave out tokens that cost entropy (clip_cov); or a function of yours, "
        "file.py:NAME.",
        reads="files",
    )
    cliprange: Optional[list[float]] = flag(
        None,
        "Clip range of the probability ratio, below and above 1, or one number for both sides; "
        f"default: {_CLIPRANGES}.",
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
        "per-sequence sums / --max_answer_seq_len. auto: constant for "
        f"{named(ESTIMATORS, 'aggregation', 'constant')}, sequence for "
        f"{named(POLICY_LOSSES, 'aggregation', 'sequence')}, else token.",
    )
    top_entropy_share: float = flag(
        1.0,
        "Learn from this share of a rollout's tokens alone, those of the highest entropy (0.2 in "
        "arXiv 2506.01939); recomputes all old log-probs.",
        gt=0,
        le=1,
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
    rollout_is: Literal[tuple(["off", *CORRECTIONS])] = flag(  # type: ignore[valid-type]
        "off",
        "Importance weights, training / rollout probability. Per token: truncated at the end of "
        "--rollout_is_range (tis), or masked outside it (icepop). By the product over an answer: "
        "truncated (seq_tis), or the answer dropped above (seq_mask). geo_mask: drop answers whose "
        "geometric mean is outside.",
    )
    rollout_is_range: Optional[list[float]] = flag(
        None,
        f"Smallest importance weight that {named(CORRECTIONS, 'has_smallest')} keep, and the "
        f"largest; default: {_RANGES}.",
        needs="rollout_is",
    )
    off_policy_mask_threshold: Optional[float] = flag(
        None,
        "Leave out negative advantages of answers whose log-probs fell by more than this on "
        "average since they were drawn, in nats per token (DeepSeek-V3.2; 0.5 is usual).",
        gt=0,
    )
    use_bias_correction_kl: bool = flag(
        False,
        "Weigh the KL in the loss by the ratio to the old policy, so that its gradient stays "
        "unbiased after the first step.",
    )

    @property
    def estimator(self) -> Estimator:
        return ESTIMATORS.get(self.advantage_estimator, OWN_ESTIMATOR)

    @property
    def loss_of_policy(self) -> PolicyLoss:
        return POLICY_LOSSES.get(self.policy_loss, OWN_POLICY_LOSS)

    @property
    def has_critic(self) -> bool:
        return self.estimator.has_critic

    @property
    def kl_weight(self) -> float:
        return self.estimator.kl_coef if self.kl_coef is None else self.kl_coef

    @property
    def kl_is_in_loss(self) -> bool:
        return self.estimator.kl_in_loss if self.kl_in_loss is None else self.kl_in_loss

    @property
    def kl_by(self) -> Literal["k1", "k2", "k3"]:
        return self.kl_estimator or (self.estimator.kl_of_loss if self.kl_is_in_loss else "k1")

    @property
    def needs_reference(self) -> bool:
        """Whether a reference model is needed: for the KL penalty, or to log the KL."""
        return self.kl_weight > 0 or self.kl_target is not None or self.log_kl

    @property
    def cliprange_sides(self) -> tuple[float, float]:
        """Clip range of the ratio (below 1, above 1)."""
        given = self.cliprange or self.loss_of_policy.cliprange
        return given[0], given[-1]

    @property
    def aggregation(self) -> Aggregation:
        if self.loss_aggregation != "auto":
            return self.loss_aggregation
        return self.loss_of_policy.aggregation or self.estimator.aggregation

    @property
    def importance_range(self) -> tuple[float, float]:
        """Importance weights that are used unchanged: (smallest, largest)."""
        row = CORRECTIONS.get(self.rollout_is, CORRECTIONS["tis"])
        low, high = self.rollout_is_range or row.range
        return (low if row.has_smallest else 0.0, high)

    def validate_algorithm(self, num_samples_per_prompt: int, max_answer_seq_len: int) -> None:
        require(
            self.cliprange is None or self.loss_of_policy.has_range,
            f"--cliprange is not used by --policy_loss {self.policy_loss}; leave it out",
        )
        low, num_sides = self.cliprange_sides[0], len(self.cliprange or (0, 0))
        require(
            num_sides == 2 or (num_sides == 1 and self.loss_of_policy.is_symmetric),
            f"--cliprange {' '.join(map(str, self.cliprange or ()))}: give two numbers, the ranges "
            "below and above 1, or leave it out; one number, for both, is for --policy_loss "
            f"{named(POLICY_LOSSES, 'is_symmetric')}",
        )
        require(
            low <= 1 or not self.loss_of_policy.has_range,
            f"--cliprange {low} below 1 must be at most 1: a ratio is never negative",
        )
        require(
            self.dual_clip is None or self.loss_of_policy.has_dual_clip,
            f"--dual_clip is for --policy_loss {named(POLICY_LOSSES, 'has_dual_clip')}; leave it "
            f"out with {self.policy_loss}",
        )
        require(
            not (self.kl_is_in_loss and self.kl_by == "k1" and self.kl_weight > 0),
            "--kl_estimator k1 has zero expected gradient in the loss; choose k2 or k3",
        )
        require(
            self.kl_target is None or self.kl_weight > 0,
            "--kl_target adapts --kl_coef, which is 0 and would stay 0; set it, e.g. to 0.1",
        )
        name = self.advantage_estimator
        for given, compares in (
            (f"--advantage_estimator {name}", self.estimator.compares_group),
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
            not self.estimator.by_source or self.kl_is_in_loss or self.kl_weight == 0,
            f"--advantage_estimator {name} normalizes every reward, so that a KL in the reward has "
            "no weight; leave --no_kl_in_loss out",
        )
        require(
            self.top_entropy_share == 1 or self.old_logprobs != "rollout",
            "--top_entropy_share needs the entropies that --old_logprobs recompute computes",
        )
        require(
            not self.use_bias_correction_kl or (self.kl_is_in_loss and self.kl_weight > 0),
            "--use_bias_correction_kl is for a KL in the loss; pass --kl_in_loss and a --kl_coef "
            "above 0, or leave it out",
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
    teacher_prompt: str = flag(
        "",
        "Function, file.py:NAME, of prompt, completion, score, reference and other columns of a "
        "row, which returns the prompt that the teacher reads in front of the completion, or None "
        "for the actor's; without a teacher model the actor is the teacher (SDFT, SDPO).",
        reads="files",
    )
    distill_coef: float = flag(
        1.0, "Weight of the reverse KL to the teacher in the advantages.", ge=0
    )
    distill_gamma: float = flag(
        0.0,
        "Discount of later tokens' KL to the teacher; 0: a token's own KL only, 1: the answer's "
        "from the token on.",
        ge=0,
        le=1,
    )
    distill_top_k: int = flag(
        0,
        "Put the KL to the teacher in the loss, over the N likeliest tokens of the teacher and "
        "of the actor at each position; 0: in the advantage of the sampled token.",
        ge=0,
    )

    @property
    def has_teacher(self) -> bool:
        return bool(self.teacher_model_name_or_path or self.teacher_prompt)

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
