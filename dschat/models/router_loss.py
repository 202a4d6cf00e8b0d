"""Adds the load-balancing loss that the config of a mixture of experts asks for.

It is the function of the family's own module (Switch Transformer, arXiv 2101.03961, eqs. 4 to 6),
over the real tokens of a micro-batch and all layers; a prompt that rows share counts once.
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
_ARGUMENTS = {"gate_logits", "num_experts", "top_k", "attention_mask"}


class RouterLoss:
    """Records a model's router logits in every forward with gradients.

    Use `add_router_loss_to` a model, then `with_router_loss` after each forward.
    """

    def __init__(self, packed: PackedModel, body: nn.Module, function: Any, coefficient: float):
        self._packed, self._function, self._coefficient = packed, function, coefficient
        self._top_k = packed.base.config.get_text_config().num_experts_per_tok
        self._logits: tuple[Tensor, ...] = ()
        # NOTE: on the backbone: the class with the head would compute the loss with our mask.
        body.register_forward_pre_hook(self._ask, with_kwargs=True)
        body.register_forward_hook(self._keep)

    def _ask(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, kwargs | {"output_router_logits": torch.is_grad_enabled()}

    def _keep(self, _: nn.Module, args: Any, output: Any) -> None:
        self._logits = output.router_logits if torch.is_grad_enabled() else ()

    def take(self, rows: PackedRows) -> Tensor:
        """The loss (0-d fp32) of the last forward, which ran ``rows``, without its coefficient."""
        logits, self._logits = self._logits, ()
        mask = None
        if not self._packed.packs:
            columns = torch.arange(rows.padded_ids.shape[1])
            mask = columns < torch.tensor(rows.lengths).unsqueeze(1)
        return self._function(logits, logits[0].shape[-1], self._top_k, mask)

    def add(
        self, loss: Tensor, sums: dict[str, Tensor], rows: PackedRows, weight: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """``loss`` and ``sums`` of a micro-batch with ``weight`` in the step's denominator."""
        router = weight * self.take(rows)
        return loss + self._coefficient * router, sums | {METRIC: router.detach()}


def add_router_loss_to(packed: PackedModel, is_wanted: bool) -> None:
    """Set ``packed.router_loss`` where the config has a coefficient and ``is_wanted``.

    One log line says that the loss is added, or why it is not.
    """
    config, body = packed.base.config.get_text_config(), backbone(packed.base)
    names = ("router_aux_loss_coef", "aux_loss_coef")  # the second is JetMoE's
    coefficient = next((c for c in (getattr(config, name, None) for name in names) if c), 0.0)
    recorded = getattr(body, "_can_record_outputs", None) or {}
    routers = recorded.get("router_logits", [])
    kinds = [r.target_class for r in (routers if isinstance(routers, list) else [routers])]
    has_routers = body is not None and any(isinstance(m, tuple(kinds)) for m in body.modules())
    if not coefficient or (routers and not has_routers):
        return
    family = type(packed.base).__name__
    function = getattr(sys.modules[type(body).__module__], "load_balancing_loss_func", None)
    known = function and set(inspect.signature(function).parameters) == _ARGUMENTS
    if not is_wanted:
        reason = "the policy's loss has no such term"
    elif not (known and has_routers and hasattr(config, "num_experts_per_tok")):
        reason = "its class has no such loss"
    else:
        packed.router_loss = RouterLoss(packed, body, function, coefficient)
        logger.info("%s: %g x load-balancing loss is added (%s)", family, coefficient, METRIC)
        return
    logger.info("%s: its router_aux_loss_coef %g is not applied: %s", family, coefficient, reason)


def with_router_loss(
    model: ModelOrEngine,
    loss: Tensor,
    sums: dict[str, Tensor],
    rows: PackedRows,
    weight: int,
) -> tuple[Tensor, dict[str, Tensor]]:
    """``loss`` and ``sums`` of a micro-batch that ``model`` ran, with its router loss if any."""
    router = getattr(getattr(model, "module", model), "router_loss", None)
    if router is None or not torch.is_grad_enabled():
        return loss, sums
    return router.add(loss, sums, rows, weight)
