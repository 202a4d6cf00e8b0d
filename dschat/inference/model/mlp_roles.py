"""Finds the roles in an MLP or a mixture of experts, see `roles`.

Shapes: T tokens, E hidden size.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from dschat.inference.model.device_module import is_experts, is_plain, layers_of
from dschat.inference.model.findings import Findings, NotFound, is_close, need
from dschat.inference.model.spec import ExpertSpec, WeightSource
from dschat.inference.model.trial import LINEAR, Call


def mlp_roles(found: Findings, calls: list[Call], target: str) -> tuple[Tensor, Tensor]:
    """What an MLP, or experts, read and return."""
    for call in calls:
        if is_experts(call.module):
            return _experts(found, call, calls, target)
    linears = [call for call in calls if type(call.module) in LINEAR]
    need(len(linears) in (2, 3), f"an MLP of {len(linears)} linear layers")
    *ups, down = linears
    x, inner = found.read(ups[0]), found.read(down)
    need(all(is_close(found.read(up), x) for up in ups), "an MLP with several inputs")
    parts: tuple[str, ...] = ("",)
    ys = [found.result(up) for up in ups]
    gated = len(ups) == 2 or ys[0].shape[1] == 2 * inner.shape[1]
    if gated and len(ups) == 1:
        ys = [*ys[0].chunk(2, -1)]
    for name in found.activations():
        act = ACT2FN[name]
        if not gated and is_close(act(ys[0]), inner):
            break
        if gated and is_close(act(ys[0]) * ys[1], inner):
            parts = ("gate", "up") if len(ups) == 2 else ("",)
            break
        if len(ups) == 2 and is_close(act(ys[1]) * ys[0], inner):
            parts = "up", "gate"
            break
    else:
        raise NotFound("its MLP is neither act(gate) * up nor act(up)")
    found.fact(activation=name, gated=gated, intermediate_size=inner.shape[1])
    for up, part in zip(ups, parts, strict=True):
        found.take(up.module, f"{target}.up", part)
    found.take(down.module, f"{target}.down")
    return x, found.result(down)


def _experts(found: Findings, call: Call, calls: list[Call], target: str) -> tuple[Tensor, Tensor]:
    experts, (x, *chosen_and_shares) = call.module, call.inputs
    chosen, shares = sorted(chosen_and_shares, key=torch.is_floating_point)
    need(is_plain(experts) and experts.has_gate, "its experts have no gate, or more than that")
    routers = [
        c.module
        for c in calls
        if c.module is not experts and any(True for _ in c.module.parameters(recurse=False))
    ]
    need(len(routers) == 1, "there are other weights beside experts and their router")
    router = routers[0]
    logits = F.linear(x, router.weight, getattr(router, "bias", None))
    likely, best = logits.float().softmax(-1).topk(chosen.shape[1])
    need(torch.equal(best, chosen), "experts are chosen in another way")
    normed = likely / likely.sum(-1, keepdim=True)
    renormalized = is_close(normed, shares)
    need(renormalized or is_close(likely, shares), "experts have other shares")
    (ups, _), (downs, _) = layers_of(experts)
    of_downs = found.trial.shapes[f"{call.name}.down_proj"]
    sizes = len(ups), chosen.shape[1], of_downs[1 if experts.is_transposed else 2]
    clamped = None
    if hasattr(experts, "alpha") and hasattr(experts, "limit"):
        clamped = experts.alpha, experts.limit
    interleaved = not getattr(experts, "is_concatenated", True)
    spec = ExpertSpec(*sizes, renormalized, clamped)
    for name in found.activations():
        if is_close(_mixed(experts, x, chosen, shares, name, clamped, interleaved), call.output):
            break
    else:
        raise NotFound("its experts are not act(gate) * up")
    found.fact(activation=name, gated=True, experts=spec)
    found.take(router, f"{target}.router")
    for e in range(len(ups)):
        for key, kind in (("gate_up_proj", "up"), ("down_proj", "down")):
            names = f"{call.name}.{key}", f"{target}.experts.{kind}.{e}"
            how = experts.is_transposed, interleaved and kind == "up", e
            weight = WeightSource(names[0], f"{names[1]}.weight", "", *how)
            found.sources.append(weight)
            if experts.has_bias:
                bias = replace(weight, name=f"{names[0]}_bias", target=f"{names[1]}.bias")
                found.sources.append(replace(bias, transposed=False))
    return x, call.output


def _mixed(
    experts: Any,
    x: Tensor,
    chosen: Tensor,
    shares: Tensor,
    activation: str,
    clamped: tuple[float, float] | None,
    interleaved: bool,
) -> Tensor:
    """Outputs (T, E) of ``experts``, one token and one choice at a time."""
    (ups, up_biases), (downs, down_biases) = layers_of(experts)
    outputs = torch.zeros_like(x)
    for t, e, share in _choices(chosen, shares):
        inner = F.linear(x[t], ups[e], None if up_biases is None else up_biases[e])
        gate, up = (inner[0::2], inner[1::2]) if interleaved else inner.chunk(2)
        if clamped is None:
            inner = ACT2FN[activation](gate) * up
        else:
            gate, up = gate.clamp(max=clamped[1]), up.clamp(-clamped[1], clamped[1])
            inner = (up + 1) * gate * torch.sigmoid(clamped[0] * gate)
        bias = None if down_biases is None else down_biases[e]
        outputs[t] += share * F.linear(inner, downs[e], bias)
    return outputs


def _choices(chosen: Tensor, shares: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """Token, expert and share."""
    for t, of_token in enumerate(chosen.tolist()):
        for j, e in enumerate(of_token):
            yield t, e, shares[t, j]
