"""Estimators of advantages, policy losses and corrections of the rollout's probabilities: one row
each, with all that flags, documentation and the trainer ask about it.

To add one: a row here, and the function that it names in `dschat.losses`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

KL = Literal["k1", "k2", "k3"]
Aggregation = Literal["token", "sequence", "constant"]


@dataclass(frozen=True)
class Estimator:
    """A value of ``--advantage_estimator``.

    Attributes:
        function: in `dschat.losses.advantages`; its parameters name what it gets, attributes of
            `dschat.rlhf.advantages.Given`.
        formula, source: of the documentation's table; A is the advantage, r an answer's reward.
        kl_in_loss: the KL penalty is in the loss by default, not in the reward.
        kl_of_loss: estimator of the KL in the loss by default; in the reward it is k1.
        compares_group: compares the answers to one prompt, so that there must be several.
        by_source: compares each source's scores, not their sum.
        whitens: whitens the advantages over the rollout; ``--whiten_advantages`` is for a critic's.
        learning_rate, schedule, kl_coef: defaults of the actor's rate, of its schedule, and of the
            weight of the KL. gae has DeepSpeed-Chat's, the others today's usual ones.
    """

    function: str
    formula: str
    source: str
    has_critic: bool = False
    compares_group: bool = False
    by_source: bool = False
    whitens: bool = False
    kl_in_loss: bool = False
    kl_of_loss: KL = "k3"
    learning_rate: float = 5e-6
    schedule: Literal["cosine", "constant"] = "constant"
    kl_coef: float = 0.01
    aggregation: Aggregation = "token"


ESTIMATORS = {
    "gae": Estimator(
        "gae",
        "GAE of the critic's values, whitened",
        "PPO: arXiv 1506.02438, 1707.06347",
        has_critic=True,
        whitens=True,
        learning_rate=9.65e-6,
        schedule="cosine",
        kl_coef=0.1,
    ),
    "grpo": Estimator(
        "grpo_advantages",
        "(r - group mean) / (group standard deviation + 1e-6)",
        "arXiv 2402.03300",
        compares_group=True,
        kl_in_loss=True,
        kl_coef=0.0,
    ),
    "dr_grpo": Estimator(
        "dr_grpo_advantages",
        "r - group mean",
        "arXiv 2503.20783",
        compares_group=True,
        kl_in_loss=True,
        kl_coef=0.0,
        aggregation="constant",
    ),
    "gdpo": Estimator(
        "gdpo_advantages",
        "`grpo` of each reward alone, added by weight, whitened",
        "arXiv 2601.05242",
        compares_group=True,
        by_source=True,
        whitens=True,
        kl_in_loss=True,
        kl_coef=0.0,
    ),
    "rloo": Estimator(
        "rloo_advantages",
        "r - mean of the group's others",
        "arXiv 2402.14740",
        compares_group=True,
        kl_coef=0.05,
    ),
    "reinforce": Estimator("returns_to_go", "sum of rewards from the action on", "Williams 1992"),
    "reinforce_pp": Estimator(
        "returns_to_go", "the same, whitened over the rollout", "arXiv 2501.03262", whitens=True
    ),
    "reinforce_pp_baseline": Estimator(
        "baselined_returns",
        "the same of r - group mean, whitened",
        "arXiv 2501.03262",
        compares_group=True,
        whitens=True,
        kl_in_loss=True,
        kl_of_loss="k2",
    ),
}
# The user's, file.py:NAME.
OWN_ESTIMATOR = Estimator("", "", "")


@dataclass(frozen=True)
class PolicyLoss:
    """A value of ``--policy_loss``.

    Attributes:
        function: in `dschat.losses.policy`, with the arguments of `ppo_loss` there.
        summary, source: of the documentation's table.
        cliprange: default clip range of the ratio, below and above 1.
        has_range: ``--cliprange`` changes it.
        is_symmetric: one number of ``--cliprange`` is for both sides.
        has_dual_clip: takes ``dual_clip``.
        clips_covariance: some of the actions that `dschat.losses.is_covariant` finds are left out.
        most_clipped: a larger share of clipped actions is logged as a warning.
        aggregation: by default; None: the estimator's.
    """

    function: str
    summary: str
    source: str
    cliprange: tuple[float, float] = (0.2, 0.2)
    has_range: bool = True
    is_symmetric: bool = False
    has_dual_clip: bool = False
    clips_covariance: bool = False
    most_clipped: float = 0.3
    aggregation: Aggregation | None = None


POLICY_LOSSES = {
    "ppo": PolicyLoss(
        "ppo_loss",
        "the clipped ratio of each token",
        "arXiv 1707.06347, eq. 7",
        is_symmetric=True,
        has_dual_clip=True,
    ),
    "gspo": PolicyLoss(
        "gspo_loss",
        "the clipped ratio of the sequence (geometric mean)",
        "arXiv 2507.18071",
        cliprange=(3e-4, 4e-4),
        most_clipped=0.4,  # all tokens of a sequence
        aggregation="sequence",
    ),
    "cispo": PolicyLoss(
        "cispo_loss",
        "REINFORCE weighted by the clipped ratio; all tokens have a gradient",
        "arXiv 2506.13585",
        cliprange=(1.0, 4.0),
    ),
    "sapo": PolicyLoss(
        "sapo_loss",
        "a soft gate instead of a clip, of temperature 1.05 where A < 0, else 1",
        "arXiv 2511.20347",
        cliprange=(1.05, 1.0),
        has_range=False,
        aggregation="sequence",
    ),
    "clip_cov": PolicyLoss(
        "ppo_loss",
        "`ppo` without a few tokens, drawn where log-prob and A are both high",
        "arXiv 2505.22617",
        has_dual_clip=True,
        is_symmetric=True,
        clips_covariance=True,
    ),
}
OWN_POLICY_LOSS = PolicyLoss("", "", "")


@dataclass(frozen=True)
class Correction:
    """A value of ``--rollout_is``.

    Attributes:
        range: default of the smallest importance weight that is kept, and the largest.
        has_smallest: the smaller end counts.
    """

    range: tuple[float, float]
    has_smallest: bool = False


# Bounds: TRL's (seq_mask), verl's (tis, seq_tis), their papers' (icepop), OpenRLHF's (geo_mask).
CORRECTIONS = {
    "tis": Correction((0.5, 2.0)),
    "icepop": Correction((0.5, 5.0), has_smallest=True),
    "seq_tis": Correction((0.5, 2.0)),
    "seq_mask": Correction((0.5, 3.0)),
    "geo_mask": Correction((0.5, 5.0), has_smallest=True),
}


def named(table: Mapping[str, object], fact: str, is_so: object = True) -> str:
    """The names of the rows of ``table`` whose ``fact`` has this value, for a help text."""
    names = [name for name, row in table.items() if getattr(row, fact) == is_so]
    return ", ".join(names[:-1]) + " and " * (len(names) > 1) + names[-1]
