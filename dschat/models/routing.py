"""Mixtures of experts in training: load-balancing loss, spread of tokens, replay of a rollout's
choices.

The loss is the function of the family's own module (Switch Transformer, arXiv 2101.03961, eqs. 4 to
6), over all layers and the real tokens of a micro-batch; a prompt that rows share counts once.
"""

import inspect
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

import dschat.distributed as dist
from dschat.config import UserError
from dschat.models.packing.model import PackedModel, backbone, probe
from dschat.models.packing.rows import PackedRows
from dschat.models.training_engine import ModelOrEngine, evaluating

logger = logging.getLogger("dschat")

METRIC = "moe/aux_loss"
MAX_LOAD = "moe/max_load"
AGREEMENT = "moe/routing_agreement"
FLAG = "--moe_routing_replay"


def routers_of(base: PreTrainedModel) -> list[nn.Module]:
    """What chooses experts in ``base``, in the order of its layers."""
    whole = backbone(base) or base
    recorders = (getattr(whole, "_can_record_outputs", None) or {}).get("router_logits", [])
    recorders = recorders if isinstance(recorders, list) else [recorders]
    kinds: tuple[Any, ...] = tuple(getattr(r, "target_class", r) for r in recorders)
    return [module for module in whole.modules() if isinstance(module, kinds)]


def watch_routers(packed: PackedModel, asked: float | None, is_policy: bool) -> None:
    """Count the tokens of experts, and set ``packed.router_loss`` if it has a coefficient; log it.

    ``asked``: ``--router_aux_loss_coef``; None: the config's, and for a policy or critic none.
    """
    config, body = packed.base.config.get_text_config(), backbone(packed.base)
    whole, routers = body or packed.base, routers_of(packed.base)
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


# -- replay ----------------------------------------------------------------------------------------
#
# Replays the experts that a rollout chose in training's forwards ("rollout routing replay", arXiv
# 2510.11370). A router's own forward runs, but its `torch.topk` over the experts returns the given
# ones. So weights are computed as the family does, from training's router logits, with their
# gradient.


class _Choice(TorchFunctionMode):
    """Watches calls of `torch.topk`; call number ``call`` returns the experts ``given`` (T, k),
    where they are not -1.
    """

    def __init__(self, call: int = 0, given: Tensor | None = None) -> None:
        super().__init__()
        self.results: list[Tensor] = []  # the indices of every call
        self.own: Tensor | None = None  # those that ``given`` replaced
        self._call, self._given = call, given

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return result
        if self._given is not None and len(self.results) == self._call:
            self.own = result.indices
            experts = torch.where(self._given < 0, self.own, self._given)
            result = torch.return_types.topk((args[0].gather(-1, experts), experts))
        self.results.append(result.indices)
        return result


class RoutingReplay:
    """Routes the tokens of ``packed`` as its rows' ``experts`` say; other tokens as it does."""

    def __init__(self, packed: PackedModel) -> None:
        self._packed, self._routers = packed, routers_of(packed.base)
        self._experts: Tensor | None = None  # of the last forward, whose backward may run it again
        self._runs = False
        self._calls: dict[nn.Module, int] = {}  # the `torch.topk` that chooses experts
        self.sums: list[Tensor] = []  # of each forward and router: equal choices, compared ones
        if not self._routers:
            raise self._refusal("it has no experts")
        if not packed.packs:
            raise self._refusal("its rows are padded, not packed")
        for number, router in enumerate(self._routers):
            router.forward = partial(self._forward, number, router)
        packed.replay = self

    def _refusal(self, reason: str) -> UserError:
        return UserError(f"{FLAG}: not with a {type(self._packed.base).__name__}: {reason}")

    @contextmanager
    def of(self, rows: PackedRows) -> Iterator[None]:
        self._experts, self._runs = rows.experts, True
        assert rows.experts is None or rows.experts.shape[1] == len(self._routers)
        try:
            yield
        finally:
            self._runs = False

    def _forward(self, number: int, router: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # NOTE: checkpointed layers run again in the backward pass, rollouts in a module's own.
        given = self._experts if self._runs or torch.is_grad_enabled() else None
        if given is None and router in self._calls:
            return type(router).forward(router, *args, **kwargs)
        given = None if given is None else given[:, number].long()
        with _Choice(self._calls.get(router, 0), given) as choice:
            output = type(router).forward(router, *args, **kwargs)
        chosen = output[-1] if isinstance(output, tuple) and len(output) > 2 else None
        calls = [i for i, indices in enumerate(choice.results) if indices is chosen]
        if not calls:
            raise self._refusal(f"{type(router).__name__} does not return torch.topk's choice")
        self._calls[router] = calls[0]
        if given is not None and choice.own is not None and self._runs:
            same = (choice.own.sort(-1).values == given.sort(-1).values).all(-1)
            self.sums.append(torch.stack([same.sum(), (given >= 0).all(-1).sum()]))
        return output


def replay_routing(model: ModelOrEngine) -> None:
    """Collective under ZeRO-3. Have ``model`` replay the experts of its rows.

    Raises:
        UserError: its family is not known to let it.
    """
    packed: Any = getattr(model, "module", model)
    RoutingReplay(packed)
    with torch.no_grad(), evaluating(packed.base):
        packed.hidden_states(probe(packed.base).to(dist.device()))


def routing_metrics(model: ModelOrEngine) -> dict[str, float]:
    """Collective. Of forwards that replayed experts since the last call, over all ranks: the share
    of choices, of a token in a layer, where the router would choose the same set of experts.
    """
    replay = getattr(getattr(model, "module", model), "replay", None)
    if replay is None:
        return {}
    sums = torch.stack(replay.sums).sum(0).tolist() if replay.sums else [0.0, 0.0]
    replay.sums.clear()
    same, compared = dist.sum_floats([float(value) for value in sums])
    return {AGREEMENT: same / compared} if compared else {}
