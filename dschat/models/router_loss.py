"""Balances a mixture of experts: its load-balancing loss, and how evenly tokens spread.

The loss is the function of the family's own module (Switch Transformer, arXiv 2101.03961, eqs. 4 to
6), over all layers and the real tokens of a micro-batch; a prompt that rows share counts once.
"""

import inspect
import logging
import sys
from typing import Any

import torch
from torch import Tensor, nn

import dschat.distributed as dist
from dschat.models.packing.model import PackedModel, backbone
from dschat.models.packing.rows import PackedRows
from dschat.models.training_engine import ModelOrEngine

logger = logging.getLogger("dschat")

METRIC = "moe/aux_loss"
MAX_LOAD = "moe/max_load"


def watch_routers(packed: PackedModel, asked: float | None, is_policy: bool) -> None:
    """Count the tokens of experts, and set ``packed.router_loss`` if it has a coefficient; log it.

    ``asked``: ``--router_aux_loss_coef``; None: the config's, and for a policy or critic none.
    """
    config, body = packed.base.config.get_text_config(), backbone(packed.base)
    whole = body or packed.base
    recorders = (getattr(whole, "_can_record_outputs", None) or {}).get("router_logits", [])
    recorders = recorders if isinstance(recorders, list) else [recorders]
    kinds = tuple(recorder.target_class for recorder in recorders)
    routers = [module for module in whole.modules() if isinstance(module, kinds)]
    _count_loads(packed, routers)
    names = ("router_aux_loss_coef", "aux_loss_coef")  # the second is JetMoE's
    own = next(filter(None, (getattr(config, name, None) for name in names)), 0.0)
    coefficient = own if asked is None else asked
    if not coefficient or not routers:
        if asked:
            logger.warning("--router_aux_loss_coef: %s has no experts", type(packed.base).__name__)
        return
    function: Any = getattr(sys.modules[type(whole).__module__], "load_balancing_loss_func", None)
    top_k = getattr(config, "num_experts_per_tok", None)
    is_known = top_k and function and len(inspect.signature(function).parameters) == 4
    result = f"applied ({METRIC})"
    if asked is None and is_policy:
        result = "not applied to a policy or critic (--router_aux_loss_coef)"
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
            logits = tuple(map(packed.of_tokens, recorded.pop()))
            return coefficient, function(logits, logits[0].shape[-1], top_k, mask)

        body.register_forward_pre_hook(ask, with_kwargs=True)
        body.register_forward_hook(keep)
        packed.router_loss = loss
    family = type(packed.base).__name__
    logger.info("%s: router_aux_loss_coef %g is %s", family, coefficient, result)


def _count_loads(packed: PackedModel, routers: list[nn.Module]) -> None:
    """Add up ``packed.router_loads``, by router, in forwards with gradients."""
    loads: dict[nn.Module, Tensor] = {}

    def count(router: nn.Module, args: Any, output: Any) -> None:
        chosen = output[-1] if isinstance(output, tuple) else output
        if not torch.is_grad_enabled() or chosen.is_floating_point():
            return  # some routers weigh all experts
        if router not in loads:
            loads[router] = chosen.new_zeros(output[0].shape[-1])
        loads[router].index_add_(0, chosen.flatten(), torch.ones_like(chosen).flatten())

    for router in routers:
        router.register_forward_hook(count)
    packed.router_loads = loads


def router_metrics(model: ModelOrEngine) -> dict[str, float]:
    """Collective. Of the tokens trained on since the last call, over all ranks: the busiest
    expert's load / the mean load of its layer's experts, in the layer where that is largest.
    """
    loads = list((getattr(getattr(model, "module", model), "router_loads", None) or {}).values())
    if not loads:
        return {}
    sums = dist.all_reduce_sum(torch.cat(loads)).cpu().double().split([len(x) for x in loads])
    for load in loads:
        load.zero_()
    return {MAX_LOAD: max(float(x.max() / x.mean()) for x in sums)} if any(sums[0]) else {}


def add_router_loss(
    model: ModelOrEngine,
    loss: Tensor,
    sums: dict[str, Tensor],
    rows: PackedRows,
    weight: float | Tensor,
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
