"""Gathers the actor's weights from ZeRO's shards into a generator, and frees memory meanwhile.

Here it is chosen how the rollout holds the weights and their LoRA adapters: pure, so that the run
and its estimate (`--plan`) agree.
"""

from dataclasses import dataclass
from typing import Literal

from dschat.config import UserError

Layout = Literal["copy", "zero_copy"]
LoraForm = Literal["merge", "side"]


def runs_module(
    quantized: bool,
    layout: Literal["auto", "copy", "zero_copy"],
    lora: Literal["auto", "merge", "side"],
    tp_size: int,
) -> bool:
    """Whether transformers' own module generates on training's weights, though the engine knows its
    family: a copy of quantized ones would be whole.
    """
    return quantized and layout != "copy" and lora == "auto" and tp_size == 1


@dataclass(frozen=True)
class RolloutChoice:
    """``lora`` means nothing for an actor without adapters."""

    layout: Layout
    lora: LoraForm


def rollout_choice(
    layout: Literal["auto", "copy", "zero_copy"],
    lora: Literal["auto", "merge", "side"],
    *,
    has_adapters: bool,
    frozen_base: bool,
    sharded: bool,
    readable: bool,
    on_cpu: bool,
) -> RolloutChoice:
    """The layout and LoRA form for the flags ``layout`` and ``lora``.

    Args:
        frozen_base: only adapters are trained.
        sharded: ZeRO-3.
        readable: the rollout can read training's weights in place: every process has them whole, on
            its device and in the rollout's dtype, and generates alone.

    Raises:
        UserError: the flags ask for what is not possible.
    """
    if lora == "side" and not frozen_base:
        raise UserError("--rollout_lora side needs --only_optimize_lora: the base is trained")
    can_borrow = readable and (not has_adapters or (frozen_base and lora != "merge"))
    if layout == "zero_copy" and not can_borrow:
        raise UserError(
            "--rollout_layout zero_copy needs whole weights on every process's device: "
            "--actor_zero_stage 2 or less (or one process without --offload params), "
            "--inference_tp_size 1, no LoRA or --rollout_lora side (auto, if quantized)"
        )
    if layout == "auto":
        # On a CPU packed weights are faster.
        layout = "zero_copy" if can_borrow and not on_cpu else "copy"
    if not has_adapters:
        lora = "merge"
    elif lora == "auto":
        # "side": a frozen base is read in place, or need not be gathered for every version.
        lora = "side" if frozen_base and (sharded or layout == "zero_copy") else "merge"
    return RolloutChoice(layout, lora)
