"""Adds the load-balancing loss that the config of a mixture of experts asks for.

It is the function of the family's own module (Switch Transformer, arXiv 2101.03961, eqs. 4 to 6),
over all layers and the real tokens of a micro-batch; a prompt that rows share counts once.
"""

import inspect
import logging
import sys
from typing import Any

import torch
from torch import Tensor, nn

from dschat.models.packing.model import PackedModel, backbone
from dschat.models.packing.rows import PackedRows
from dschat.models.training_engine import ModelOrEngine

logger = logging.getLogger("dschat")

METRIC = "moe/aux_loss"


def watch_routers(packed: PackedModel, is_wanted: bool) -> None:
    """Set ``packed.router_loss`` if its config has a coefficient and ``is_wanted``; log which."""
    config, body = packed.base.config.get_text_config(), backbone(packed.base)
    names = ("router_aux_loss_coef", "aux_loss_coef")  # the second is JetMoE's
    coefficient = next(filter(None, (getattr(config, name, None) for name in names)), None)
    whole = body or getattr(packed.base, "model", packed.base)
    recorders = (getattr(whole, "_can_record_outputs", None) or {}).get("router_logits", [])
    recorders = recorders if isinstance(recorders, list) else [recorders]
    kinds = tuple(recorder.target_class for recorder in recorders)
    if not coefficient or not any(isinstance(module, kinds) for module in whole.modules()):
        return
    function: Any = getattr(sys.modules[type(whole).__module__], "load_balancing_loss_func", None)
    top_k = getattr(config, "num_experts_per_tok", None)
    is_known = top_k and function and len(inspect.signature(function).parameters) == 4
    result = f"applied ({METRIC})"
    if not is_wanted:
        result = "not applied to a policy or critic"
    elif body is None or not is_known:
        result = "not applied: its class has no such loss"
    else:
        recorded: list[tuple[Tensor, ...]] = []  # router logits of the last forward, by layer

        # NOTE: of the backbone: the class with the head would compute the loss with our mask.
        def ask(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            return args, kwargs | {"output_router_logits": torch.is_grad_enabled()}

        def keep(_: nn.Module, args: Any, output: Any) -> None:
            recorded[:] = [output.router_logits] if torch.is_grad_enabled() else []

        def loss(mask: Tensor | None) -> tuple[float, Tensor]:
            logits = recorded.pop()
            return coefficient, function(logits, logits[0].shape[-1], top_k, mask)

        body.register_forward_pre_hook(ask, with_kwargs=True)
        body.register_forward_hook(keep)
        packed.router_loss = loss
    family = type(packed.base).__name__
    logger.info("%s: router_aux_loss_coef %g is %s", family, coefficient, result)


def add_router_loss(
    model: ModelOrEngine, loss: Tensor, sums: dict[str, Tensor], rows: PackedRows, weight: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """``loss`` and ``sums`` of a micro-batch of ``weight`` in the step's denominator, which
    ``model`` just ran; with its router loss if it has one and gradients are on.
    """
    packed: Any = getattr(model, "module", model)
    if not torch.is_grad_enabled() or getattr(packed, "router_loss", None) is None:
        return loss, sums
    mask = None
    if not packed.packs:
        columns = torch.arange(rows.padded_ids.shape[1])
        mask = columns < torch.tensor(rows.lengths).unsqueeze(1)
    coefficient, value = packed.router_loss(mask)
    return loss + coefficient * weight * value, sums | {METRIC: weight * value.detach()}
