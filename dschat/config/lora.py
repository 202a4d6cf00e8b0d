"""Flags of step 3's LoRA adapters: which models have them, and whether their base is shared.

Part of `dschat.config.RLHFConfig`.
"""

from dataclasses import dataclass
from typing import Optional

from dschat.config.errors import require
from dschat.config.fields import flag


@dataclass
class LoraConfig:
    """LoRA."""

    actor_lora_dim: int = flag(0, "LoRA rank of the actor; 0: full fine-tuning.", ge=0)
    critic_lora_dim: int = flag(0, "LoRA rank of the critic; 0: full fine-tuning.", ge=0)
    lora_alpha: float = flag(0.0, "LoRA alpha; 0: twice the rank.", ge=0)
    actor_lora_modules: list[str] = flag(
        ["all-linear"],
        "Modules of the actor with LoRA adapters.",
        aliases=["--actor_lora_module_name"],
    )
    critic_lora_modules: list[str] = flag(
        ["all-linear"],
        "Modules of the critic with LoRA adapters.",
        aliases=["--critic_lora_module_name"],
    )
    only_optimize_lora: bool = flag(True, "Train LoRA adapters (and the score head) only.")
    share_base: bool = flag(
        False,
        "Hold the actor's frozen weights once: reward model and critic are step 2's LoRA adapter "
        "and score head on them. --critic_lora_dim, by default the actor's, is that of a critic "
        "without a reward model.",
    )

    def validate_shared_base(
        self, sharded: bool, dropouts: tuple[Optional[float], Optional[float]]
    ) -> None:
        """``sharded``: a model is, by ZeRO-3 or offloading; ``dropouts``: of actor and critic."""
        if not self.share_base:
            return
        require(
            self.actor_lora_dim > 0 and self.only_optimize_lora,
            "--share_base needs frozen weights: pass --actor_lora_dim, such as 64",
        )
        require(
            not sharded,
            "--share_base excludes ZeRO-3 and --offload reward, which shard a model's weights: use "
            "--actor_zero_stage and --critic_zero_stage 2 or less",
        )
        actor, critic = (dropout or 0.0 for dropout in dropouts)
        require(
            actor == critic,
            f"--share_base: --actor_dropout {actor:g} and --critic_dropout {critic:g} must be one",
        )
