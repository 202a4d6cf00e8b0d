"""Flags of the loss on preference pairs; a part of `dschat.config.RewardConfig`."""

from dataclasses import dataclass
from typing import Literal, Optional

from dschat.config.errors import require
from dschat.config.fields import flag, speed_flag

# flag -> the losses that use it
_LOSSES = {
    "beta": ("dpo", "ipo", "kto"),
    "label_smoothing": ("dpo",),
    "kto_desirable_weight": ("kto",),
    "kto_undesirable_weight": ("kto",),
    "precompute_ref_logprobs": ("dpo", "ipo", "kto"),
}


@dataclass
class PreferenceConfig:
    """Loss on pairs."""

    loss: Literal["pairwise", "dpo", "ipo", "kto"] = flag(
        "pairwise",
        "pairwise: train a reward model for step 3. Others: train the policy (step 1's causal LM) "
        "on the pairs, in place of step 3; dropout is off unless --dropout is given.",
        short=True,
    )
    beta: Optional[float] = flag(
        None,
        "Strength of the KL constraint of dpo and kto; of ipo (tau): train up to a margin of "
        "1 / (2 beta) nats, so that dpo's larger values learn little; default: 0.1.",
        short=True,
        gt=0,
    )
    label_smoothing: float = flag(
        0.0,
        "Assumed share of wrong labels in dpo: conservative DPO.",
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
    def kto_weights(self) -> tuple[float, float]:
        """Weights of (chosen, rejected) answers."""
        given = (self.kto_desirable_weight, self.kto_undesirable_weight)
        return tuple(1.0 if weight is None else weight for weight in given)  # type: ignore[return-value]

    def validate_preferences(self) -> None:
        for name, losses in _LOSSES.items():
            require(
                getattr(self, name) in (None, False) or self.loss in losses,
                f"--{name} is not used by --loss {self.loss}; leave it out, or choose --loss "
                f"{' or '.join(losses)}",
            )
