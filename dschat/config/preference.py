"""The knobs of learning from pairs: which loss, and what is a part of it.

They are part of `dschat.config.RewardConfig`. It must not know models, data or memory.
"""

from dataclasses import dataclass
from typing import Literal, Optional

from dschat.config.errors import require
from dschat.config.fields import flag

# knob -> the losses that have it
_PARTS = {
    "beta": ("dpo", "cdpo", "ipo", "kto"),
    "label_smoothing": ("dpo", "cdpo"),
    "kto_desirable_weight": ("kto",),
    "kto_undesirable_weight": ("kto",),
    "precompute_ref_logprobs": ("dpo", "cdpo", "ipo", "kto"),
    "offload_reference_model": ("dpo", "cdpo", "ipo", "kto"),
}


@dataclass
class PreferenceConfig:
    """How step 2 learns from pairs: a reward model does, or the policy itself."""

    loss: Literal["pairwise", "dpo", "cdpo", "ipo", "kto"] = flag(
        "pairwise",
        "pairwise trains a reward model, for step 3. The others train the policy (a causal LM, "
        "step 1's) on the pairs directly, in place of step 3, without dropout unless --dropout.",
    )
    beta: Optional[float] = flag(
        None, "How closely dpo, cdpo, ipo (its tau) and kto keep to the reference; default 0.1."
    )
    label_smoothing: Optional[float] = flag(
        None, "Share of pairs taken to be labelled wrongly; default 0, with cdpo 0.1."
    )
    kto_desirable_weight: Optional[float] = flag(None, "kto's weight of chosen answers; default 1.")
    kto_undesirable_weight: Optional[float] = flag(
        None, "kto's weight of rejected answers; default 1."
    )
    precompute_ref_logprobs: bool = flag(
        False,
        "Compute the reference's log-probs before the first step, with the policy itself, and load "
        "no reference model.",
    )
    offload_reference_model: bool = flag(False, "Keep the reference model's weights in CPU memory.")

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
        """Of chosen and of rejected answers."""
        given = (self.kto_desirable_weight, self.kto_undesirable_weight)
        return tuple(1.0 if weight is None else weight for weight in given)  # type: ignore[return-value]

    def validate_preferences(self, streaming: bool) -> None:
        """Raise ``UserError`` (flag and remedy in one line) for the first knob that cannot work."""
        for name, losses in _PARTS.items():
            require(
                getattr(self, name) in (None, False) or self.loss in losses,
                f"--{name} is no part of --loss {self.loss}; leave it out, or choose --loss "
                f"{' or '.join(losses)}",
            )
        require(self.used_beta > 0, f"--beta {self.beta} must be positive")
        require(
            0 <= self.used_label_smoothing < 0.5,
            f"--label_smoothing {self.label_smoothing} must be in [0, 0.5): with half of the "
            "labels wrong there is nothing to learn",
        )
        for name in ("kto_desirable_weight", "kto_undesirable_weight"):
            value = getattr(self, name)
            require(value is None or value >= 0, f"--{name} {value} must not be negative")
        for what, needs in (
            ("--loss kto", self.loss == "kto"),
            ("--precompute_ref_logprobs", self.precompute_ref_logprobs),
        ):
            require(
                not (streaming and needs),
                f"{what} looks at all pairs before training; leave --streaming out",
            )
