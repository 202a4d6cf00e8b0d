"""Flags of LoRA adapters in step 3, and of quantized weights under adapters (QLoRA): which models
have them, and whether their base is shared.

Quantized weights are neither sharded nor offloaded by DeepSpeed.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Optional

from dschat.config.errors import require
from dschat.config.fields import flag

# Frozen model -> the trained one whose ZeRO stage it has.
_FROZEN = {"reward": "critic", "teacher": "actor"}
# Model -> what is set where the run has it.
_PRESENT = {"critic": "has_critic"} | {name: f"{name}_model_name_or_path" for name in _FROZEN}


@dataclass
class QuantizedConfig:
    """Quantized weights (QLoRA)."""

    load_in_4bit: Optional[list[str]] = flag(
        None,
        "Hold the frozen linear layers in 4 bits (NF4). Step 3: of these models: actor, critic, "
        "reward, teacher; no value: of all.",
        nargs="*",
    )
    load_in_8bit: Optional[list[str]] = flag(None, "The same in 8 bits.", nargs="*")

    # The models that this step can quantize.
    quantizable: ClassVar[tuple[str, ...]] = ("model",)

    def weight_bits(self, model: str = "model") -> int:
        """Bits of a weight in the linear layers of ``model``: 4, 8, or 0 if not quantized."""
        return next((b for b in (4, 8) if model in self._quantized(b)), 0)

    def _quantized(self, bits: int) -> set[str]:
        names = getattr(self, f"load_in_{bits}bit") or ()
        return set(self.quantizable if "all" in names else names)

    def validate_quantization(self) -> None:
        for bits in (4, 8):
            unknown = sorted(self._quantized(bits) - {*self.quantizable})
            require(
                not unknown,
                f"--load_in_{bits}bit {' '.join(unknown)}: choose from "
                f"{', '.join(self.quantizable)} (train.py: --step3.load_in_{bits}bit has more)",
            )
        both = sorted(self._quantized(4) & self._quantized(8))
        require(
            not both,
            f"--load_in_4bit and --load_in_8bit exclude each other ({', '.join(both)}): leave one "
            "out, or name other models",
        )
        for model in self.quantizable:
            if self.weight_bits(model) and getattr(self, _PRESENT.get(model, ""), True):
                self._validate_quantized(model)

    def _validate_quantized(self, model: str) -> None:
        config: Any = self
        trained = _FROZEN.get(model, model)
        prefix = "" if trained == "model" else f"{trained}_"
        same = self._quantized(self.weight_bits(model))
        named = f"--load_in_{self.weight_bits(model)}bit" + f" {model}" * bool(prefix)
        require(
            model in _FROZEN
            or (getattr(config, f"{prefix}lora_dim") > 0 and config.only_optimize_lora),
            f"{named}: quantized weights do not train; set --{prefix}lora_dim (64, say) and leave "
            f"out --only_optimize_lora false{', or name other models' * bool(prefix)}",
        )
        require(
            model == "actor" or not getattr(config, "share_base", False) or "actor" in same,
            f"{named}: with --share_base its weights are the actor's; name the actor",
        )
        require(
            getattr(config, f"{prefix}zero_stage") < 3 and not config.offloads(model),
            f"{named}: quantized weights are neither sharded nor offloaded; use "
            f"--{prefix}zero_stage 2 or less, and leave it out of --offload",
        )


@dataclass
class LoraConfig:
    """LoRA."""

    actor_lora_dim: int = flag(0, "LoRA rank of the actor; 0: full fine-tuning.", short=True, ge=0)
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
        "and score head on them. --critic_lora_dim, by default the actor's: rank of a critic "
        "without a reward model.",
    )

    def validate_shared_base(self) -> None:
        config: Any = self  # the step's dataclass has the other flags
        if not self.share_base:
            return
        require(
            self.actor_lora_dim > 0 and self.only_optimize_lora,
            "--share_base needs frozen weights: pass --actor_lora_dim, such as 64",
        )
        require(
            max(config.actor_zero_stage, config.critic_zero_stage) < 3
            and not config.offloads("reward"),
            "--share_base excludes ZeRO-3 and --offload reward, which shard a model's weights: use "
            "--actor_zero_stage and --critic_zero_stage 2 or less",
        )
        actor, critic = config.actor_dropout or 0.0, config.critic_dropout or 0.0
        require(
            actor == critic,
            f"--share_base: --actor_dropout {actor:g} and --critic_dropout {critic:g} must be one",
        )
