"""Finds the roles in attention, see `roles`, or the parts of layers that carry states instead.

Shapes: T tokens, E hidden size, H query and K key-value heads, D head size.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dschat.inference.model.findings import Findings, NotFound, is_close, need, ratio
from dschat.inference.model.latent_roles import in_pairs, latent_roles
from dschat.inference.model.positions import Rotary, rope_parameters
from dschat.inference.model.spec import GATES, GateSpec, MixerSpec, ModelSpec, WeightSource
from dschat.inference.model.states import StateShape, StepCache
from dschat.inference.model.trial import LINEAR, Attended, Call
from dschat.models.packing.states import by_torch

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
# In the settings of rotary positions: what queries grow by beyond the original length.
_GROWTH = "llama_4_scaling_beta"


def attention_roles(
    found: Findings, calls: Sequence[Call | Attended], attended: Attended, n: int
) -> tuple[Tensor, Tensor, str | None, float]:
    """What the attention of layer ``n`` reads and returns, its rotary positions, and what its
    queries are multiplied by. ``calls``: of the layer.
    """
    target = f"layers.{n}"
    inside, place = f"{attended.name}.", calls.index(attended)
    before, after = (
        [call for call in part if isinstance(call, Call) and call.name.startswith(inside)]
        for part in (calls[:place], calls[place + 1 :])
    )
    norms = [call for call in before if found.is_norm(call.module)]
    every = [call for call in (*before, *after) if type(call.module) in LINEAR]
    linears = [call for call in every[:-1] if _letter(call, attended) != "g"]
    gates, out = [call for call in every[:-1] if call not in linears], every[-1]
    need(linears and out in after, "attention does not stand between linear layers")
    x, gate = found.read(linears[0]), found.result(gates[0]) if gates else None
    need(all(is_close(found.read(call), x) for call in gates[:1]), "a gate reads something else")
    if all(is_close(found.read(call), x) for call in linears):
        heads, in_queries = _qkv(found, linears, attended, target)
        gate = in_queries if gate is None else gate
        shown = attended
        if norms:
            heads, shown = _normed_heads(found, norms, heads, attended, target)
        rope, scale = _positions(found, n, heads, shown)
    else:
        heads, shown = latent_roles(found, linears, norms, attended, target)
        try:
            rope, scale = _positions(found, n, heads, shown)
        except NotFound:
            rope, scale = _positions(found, n, heads, in_pairs(shown))
    _gate(found, gate, attended, found.read(out), not gates)
    found.take(out.module, f"{target}.out")
    need(len(gates) < 2, "several gates")
    for call in gates:
        found.take(call.module, f"{target}.gate")
    if attended.how.sinks is not None:
        parameters = found.module(attended.name).named_parameters(recurse=False)
        sinks = [key for key, p in parameters if p.shape == attended.how.sinks.shape]
        need(len(sinks) == 1, "its sinks are no weights")
        found.sources.append(WeightSource(f"{inside}{sinks[0]}", f"{target}.sinks.weight"))
    return x, found.result(out), rope, scale


def _letter(call: Call, attended: Attended) -> str:
    """The first one of its name in attention."""
    return call.name.removeprefix(f"{attended.name}.").lower().removeprefix("w")[0]


def _gate(
    found: Findings, gate: Tensor | None, attended: Attended, out: Tensor, in_queries: bool
) -> None:
    """What multiplies attention's output on the way to ``out``."""
    if gate is None:
        need(is_close(out, attended.output), "attention is not followed by one linear layer")
        found.fact(gate=None)
        return
    heads = attended.output.unflatten(1, (attended.q.shape[1], -1))
    need(gate.shape[1] in (heads.shape[1], heads[0].numel()), "a gate of another size")
    gates = gate.unflatten(1, (heads.shape[1], -1))
    for name, activation in GATES.items():
        if is_close((heads * activation(gates)).flatten(1), out):
            found.fact(gate=GateSpec(name, gates.shape[2], in_queries))
            return
    raise NotFound("attention is not multiplied by a known gate")


def _qkv(
    found: Findings, calls: list[Call], attended: Attended, target: str
) -> tuple[list[Tensor], Tensor | None]:
    """Query and key heads (T, H or K, D) of linear layers, whose values attention gets, and
    gates (T, H * D) that follow each query.
    """
    num_heads, num_kv_heads, size = attended.q.shape[1], attended.k.shape[1], found.head_size
    need(attended.v.shape == attended.k.shape, "values have another size than keys")
    counts = [num_heads * size, num_kv_heads * size, num_kv_heads * size]
    if len(calls) == 1:
        y = found.result(calls[0])
        need(y.shape[1] == sum(counts), "fused queries, keys and values have another size")
        q, k, v = y.split(counts, -1)
        interleaved = num_heads == num_kv_heads and not is_close(v, attended.v.flatten(1))
        if interleaved:
            q, k, v = (x.flatten(1) for x in y.view(-1, num_heads, 3, size).unbind(2))
        found.take(calls[0].module, f"{target}.qkv", "", interleaved)
    else:
        firsts = (_letter(call, attended) for call in calls)
        parts = dict(zip(firsts, calls, strict=True))
        is_known = len(calls) == 3 and set(parts) == set("qkv")
        need(is_known, "queries, keys and values are not three linear layers, or one")
        for part in "qkv":
            found.take(parts[part].module, f"{target}.qkv", part)
        q, k, v = (found.result(parts[part]) for part in "qkv")
    need(is_close(v, attended.v.flatten(1)), "values are not those of a linear layer")
    gates = None
    if q.shape[1] == 2 * counts[0]:
        q, gates = (x.flatten(1) for x in q.unflatten(1, (num_heads, 2, -1)).unbind(2))
    return [x.reshape(len(x), -1, size) for x in (q, k)], gates


def _normed_heads(
    found: Findings, calls: list[Call], heads: list[Tensor], attended: Attended, target: str
) -> tuple[list[Tensor], Attended]:
    """What is rotated of ``heads``, and what becomes of it: norms are before or behind that."""
    need(len(calls) == 2, f"{len(calls)} norms of queries and keys")
    given = []
    for call, x in zip(calls, heads, strict=True):
        rows = call.inputs[0]
        if rows.shape[:3] == (1, x.shape[1], len(x)):  # heads before tokens
            rows = rows.transpose(1, 2)
        given.append(found.rows(rows).view(x.shape))
    is_first = all(is_close(*pair) for pair in zip(given, heads, strict=True))
    outputs = []
    for call, x, part in zip(calls, given, "qk", strict=True):
        weight = getattr(call.module, "weight", None)
        size = found.head_size if weight is None else weight.numel()
        is_whole = size == x.shape[1] * x.shape[2] != found.head_size
        need(is_whole or size == found.head_size, "norms of queries and keys have another size")
        found.fact(whole_qk_norm=is_whole)
        read = x.flatten(1) if is_whole else x
        y = call.module(read)
        found.take_norm(call, f"{target}.{part}_norm", read, y)
        outputs.append(y.view(x.shape))
    is_plain = is_first and all(call.module in found.rms for call in calls)
    found.fact(rotates_first=not is_first, heads_apart=not is_plain)
    if is_first:
        return outputs, attended
    need(is_close(outputs[1], attended.k), "keys are changed behind their norm")
    scale = ratio(attended.q, outputs[0])
    need(scale is not None, "queries are changed behind their norm")
    return heads, attended._replace(q=(scale or 1.0) * given[0], k=given[1])


def _positions(
    found: Findings, n: int, heads: list[Tensor], attended: Attended
) -> tuple[str | None, float]:
    """The rotary positions of layer ``n``, and what its queries are multiplied by."""
    (q, k), positions = heads, found.trial.positions
    if is_close(k, attended.k) and (scale := ratio(attended.q, q)) is not None:
        return None, scale
    given = rope_parameters(found.config)
    kind = "" if "rope_type" in given else found.config.layer_types[n] if given else ""
    settings = given.get(kind, given)
    need(settings, "queries and keys are not those of linear layers and norms")
    how = settings.get("rope_type")
    need(how in ROPE_TYPES, f"rotary positions of the type {how} are not supported")
    # A part of 1 says nothing of layers that rotate less.
    is_told = settings.get("partial_rotary_factor") not in (None, 1.0)
    for partial in (False, True) if is_told else (False,):
        for interleaved, backward in itertools.product((False, True), repeat=2):
            facts = {"interleaved_rotary": interleaved, "backward_rotary": backward}
            facts |= {"partial_rotary": partial} if is_told else {}
            if any(found.facts.get(key, value) != value for key, value in facts.items()):
                continue
            rotary = _rotary(found, kind, facts)
            if rotary.dim > q.shape[2] or rotary.dim % 2:
                continue
            turned = q.clone(), k.clone()
            for x in turned:
                rotary.rotate_(x, rotary.rows(positions))
            if not is_close(turned[1], attended.k):
                continue
            scale, growth = ratio(attended.q, turned[0]), None
            if scale is None and (factor := settings.get(_GROWTH)):
                growth = factor, settings["original_max_position_embeddings"]
                steps = torch.log1p(positions // growth[1]).view(-1, 1, 1)
                scale = ratio(attended.q, turned[0] * (1 + factor * steps))
            need(scale is not None, "queries are changed in another way")
            assert scale is not None
            found.fact(**facts, query_growth=growth)
            return kind, scale
    raise NotFound("its positions are not rotary ones of a known kind")


def _rotary(found: Findings, kind: str, facts: dict[str, bool]) -> Rotary:
    sizes = dict.fromkeys(("num_layers", "hidden_size", "num_heads", "num_kv_heads"), 0)
    sizes |= {"head_size": found.head_size, "intermediate_size": 0, "vocab_size": 0}
    known: dict[str, Any] = {**sizes, **facts, "latent": found.facts.get("latent")}
    spec = ModelSpec(**known, sources=(), prefix="", activation="")
    longest = int(found.trial.positions[-1]) + 1
    return Rotary(spec, found.config, kind, longest, torch.float32, torch.device("cpu"))


def mixers(found: Findings) -> dict[int, Call]:
    """By the layer that has it as a child."""
    trial, calls = found.trial, {}
    for name in trial.mixers:
        layer, _, number = name.rpartition(".")[0].rpartition(".")
        need(layer == trial.layers, f"{name} carries states inside of another part")
        calls[int(number)] = found.called(name)
    return calls


def take_mixer(found: Findings, call: Call, n: int) -> tuple[Tensor, Tensor]:
    """What the part ``call`` of layer ``n`` reads and returns; takes its weights."""
    name, module = call.name, found.trial.mixers[call.name]
    need(not list(module.buffers()), f"{name} has buffers")
    called = {call.name for call in found.trial.calls}  # of others, the weights are read
    linears = (path for path, child in module.named_modules() if type(child) is nn.Linear)
    spec = MixerSpec(module, frozenset(path for path in linears if f"{name}.{path}" in called))
    for path, _ in module.named_parameters():
        names = f"{name}.{path}", f"layers.{n}.{spec.target(path)}"
        found.sources.append(WeightSource(*names))
    found.mixers[n] = spec
    return found.read(call), found.result(call)


def states_of(found: Findings, width: int) -> tuple[StateShape, ...]:
    """What `Findings.mixers` leave of hidden states of ``width`` in a model of 16 bits."""
    cache, first = StepCache(config=found.config), next(iter(found.mixers.values()))
    alike = (spec.shapes == first.shapes for spec in found.mixers.values())
    need(all(alike), "parts with states differ")
    x = torch.empty(1, 2, width, device="meta", dtype=torch.bfloat16)
    with by_torch(), torch.device("meta"):
        first(x, cache, first.module.bfloat16())
    return tuple(s._replace(layer=n) for n in found.mixers for s in cache.shapes())
