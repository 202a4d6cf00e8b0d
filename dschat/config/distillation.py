"""Flags of on-policy distillation: the teacher, and the weight of the KL to it.

Part of `dschat.config.RLHFConfig`.
"""

from dataclasses import dataclass

from dschat.config.errors import require
from dschat.config.fields import flag, speed_flag


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
    offload_teacher_model: bool = speed_flag(
        False, "Keep the weights of the teacher in CPU memory."
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
