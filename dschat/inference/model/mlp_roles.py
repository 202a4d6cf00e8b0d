"""Finds the roles in an MLP or a mixture of experts, see `roles`.

Shapes: T tokens, E hidden size.
"""

import copy
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from dschat.inference.model.experts import choose
from dschat.inference.model.findings import Findings, NotFound, is_close, need, ratio
from dschat.inference.model.module_parts import is_experts, is_plain, layers_of
from dschat.inference.model.spec import ExpertSpec, Scoring, WeightSource
from dschat.inference.model.trial import LINEAR, Call

_SCORINGS: tuple[Scoring, ...] = ("softmax", "sigmoid")


def mlp_roles(found: Findings, calls: list[Call], layer: str) -> tuple[Tensor, Tensor]:
    """What the MLP of ``layer``, or its experts, read and return. ``calls``: without norms."""
    linears = [call for call in calls if type(call.module) in LINEAR]
    for call in calls:
        if is_experts(call.module):
            return _experts(found, call, calls, linears, layer)
    x, y, size = _dense(found, linears, f"{layer}.up", f"{layer}.down")
    found.fact(intermediate_size=size)
    return x, y


def _dense(
    found: Findings, linears: list[Call], up_name: str, down_name: str
) -> tuple[Tensor, Tensor, int]:
    """What an MLP of ``linears`` reads and returns, and its size."""
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
    found.fact(activation=name, gated=gated)
    for up, part in zip(ups, parts, strict=True):
        found.take(up.module, up_name, part)
    found.take(down.module, down_name)
    return x, found.result(down), inner.shape[1]


def _experts(
    found: Findings, call: Call, calls: list[Call], linears: list[Call], layer: str
) -> tuple[Tensor, Tensor]:
    experts, (x, *chosen_and_shares) = call.module, call.inputs
    chosen, shares = sorted(chosen_and_shares, key=torch.is_floating_point)
    need(is_plain(experts) and experts.has_gate, "its experts have no gate, or more than that")
    router, spec = _router(found, call, calls, layer, x, chosen, shares)
    y, of_downs = found.result(call), found.trial.shapes[f"{call.name}.down_proj"]
    clamped = None
    if hasattr(experts, "alpha") and hasattr(experts, "limit"):
        clamped = experts.alpha, experts.limit
    interleaved = not getattr(experts, "is_concatenated", True)
    for name in found.activations():
        if is_close(_mixed(experts, x, chosen, shares, name, clamped, interleaved), y):
            break
    else:
        raise NotFound("its experts are not act(gate) * up")
    found.fact(activation=name, gated=True)
    linears = [c for c in linears if c.name != router]
    gates = [c for c in linears if c.output.shape[-1] == 1]
    beside, shared = [c for c in linears if c not in gates], 0
    if beside:
        need(clamped is None, "an MLP beside experts that are cut")
        names = f"{layer}.shared_up", f"{layer}.shared_down"
        read, added, shared = _dense(found, beside, *names)
        need(is_close(read, x), "the MLP beside experts reads something else")
        for gate in gates:
            need(len(gates) == 1 and is_close(found.read(gate), x), "gates that are not known")
            found.take(gate.module, f"{layer}.shared_gate")
            added = added * found.result(gate).sigmoid()
        y = y + added
    size = of_downs[1 if experts.is_transposed else 2]
    found.fact(experts=replace(spec, size=size, shared=shared, clamped=clamped))
    _take_experts(found, call, layer, interleaved)
    return x, y


def _router(
    found: Findings,
    call: Call,
    calls: list[Call],
    layer: str,
    x: Tensor,
    chosen: Tensor,
    shares: Tensor,
) -> tuple[str, ExpertSpec]:
    """The router's name, and how it chooses experts, of size 0; takes the weights of that."""
    block, count = call.name.rpartition(".")[0], len(layers_of(call.module)[0][0])
    inside = {
        n: t
        for n, t in found.tensors.items()
        if n.startswith(f"{block}.") and not n.startswith(f"{call.name}.")
    }
    matrices = [n for n, t in inside.items() if t.shape == (count, x.shape[1])]
    need(len(matrices) == 1, "its experts have no router, or several")
    name = matrices[0].rpartition(".")[0]
    of_each = (count,), (1, count)
    others = [n for n, t in inside.items() if t.shape in of_each and n != f"{name}.bias"]
    need(len(others) < 2, "a router with several weights of each expert")
    router = found.module(name)
    used = next((c for c in calls if c.name == name), None)
    if used is not None and type(router) in LINEAR:
        logits = found.result(used)
    else:
        logits = F.linear(x, router.weight, getattr(router, "bias", None))
    given = [getattr(found.config, key, None) for key in ("n_group", "topk_group")]
    groups = tuple(given) if all(given) else None
    correction = inside[others[0]] if others else None
    ways = itertools.product(_SCORINGS, {groups, None}, ((True, 0.0), (True, 1e-6), (False, 0.0)))
    for scoring, of_groups, (renormalized, least) in ways:
        how = scoring, () if correction is None else tuple(correction.shape), of_groups
        spec = ExpertSpec(count, chosen.shape[1], 0, renormalized, *how, least=least)
        best, expected = choose(spec, logits, correction)
        (best, order), (theirs, places) = best.sort(), chosen.sort()
        if not torch.equal(best, theirs):
            continue
        scale = ratio(shares.gather(1, places), expected.gather(1, order))
        if scale is not None:
            break
    else:
        raise NotFound("its experts are chosen in another way, or have other shares")
    found.take(router, f"{layer}.router")
    for other in others:
        found.sources.append(WeightSource(other, f"{layer}.correction.weight"))
    if (before := found.facts.get("experts")) is not None:  # too little to be seen in some layers
        spec = replace(spec, least=max(before.least, spec.least))
        found.facts["experts"] = replace(before, least=spec.least)
    is_precise = used is not None and _is_precise(used)
    return name, replace(spec, scale=found.exact(scale), precise=is_precise)


def _is_precise(call: Call) -> bool:
    """Whether a router computes in fp32 in a model of 16 bits."""
    router = copy.deepcopy(call.module).bfloat16()
    output = router(*(x.bfloat16() for x in call.inputs))
    logits = output[0] if isinstance(output, tuple) else output
    x, weight = call.inputs[0].bfloat16().float(), router.weight.float()
    bias = getattr(router, "bias", None)
    exact = F.linear(x, weight, None if bias is None else bias.float())
    return is_close(logits.float().view(-1), exact.view(-1))


def _take_experts(found: Findings, call: Call, layer: str, interleaved: bool) -> None:
    experts = call.module
    for e in range(len(layers_of(experts)[0][0])):
        for key, kind in (("gate_up_proj", "up"), ("down_proj", "down")):
            names = f"{call.name}.{key}", f"{layer}.experts.{kind}.{e}"
            how = experts.is_transposed, interleaved and kind == "up", e
            weight = WeightSource(names[0], f"{names[1]}.weight", "", *how)
            found.sources.append(weight)
            if experts.has_bias:
                bias = replace(weight, name=f"{names[0]}_bias", target=f"{names[1]}.bias")
                found.sources.append(replace(bias, transposed=False))


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
