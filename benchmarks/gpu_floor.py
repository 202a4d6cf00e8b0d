"""Computes the least time that a rollout can take on a card: bytes to read over its bandwidth.

A decode step reads every weight once, save the embedding tables, of which it reads a row per token,
and all keys, values and recurrent states of its sequences. With W bytes of weights a step, K bytes
of keys and values per token, S bytes of states, B sequences of P prompt and N new tokens, and the
measured bandwidth R (of a copy, bytes read and written) and matrix rate F:

    prefill = max(W / R, FLOPs of the prompts / F)        (it draws the first token)
    decode  = sum over i = 1 .. N - 1 of (W + B ((P + i) K + S)) / R
    floor   = prefill + decode

Bytes written and activations are left out. A card reads slightly faster than it copies, so a share
of the floor is slightly too good.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch
from report import best_s
from rollout_workloads import Case
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from dschat.inference.model.module_decoder import module_spec
from dschat.inference.model.states import holds_states
from dschat.models.packing.states import by_torch
from dschat.observability.flops import prefill_flops, shape_of


@dataclass(frozen=True)
class Rates:
    """What a card does in a second: bytes of a copy (read and written), FLOPs in bf16 (0: any)."""

    copy_bytes_per_s: float
    matrix_flops_per_s: float = 0.0


def card_rates(
    device: torch.device, num_bytes: int = 2**31, sizes: Iterable[int] = (4096, 6144, 8192)
) -> Rates:
    """The best of five copies of ``num_bytes`` on ``device``, and of bf16 products of square
    matrices of random numbers, by events.

    A smaller copy would partly stay in the L2 cache (50 MB on Hopper).
    """
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = 2 * num_bytes / best_s(lambda: target.copy_(source), device)
    fastest = 0.0
    for size in sizes:
        a, b = torch.randn(2, size, size, device=device).bfloat16()
        fastest = max(fastest, 2 * size**3 / best_s(partial(torch.mm, a, b), device))
    return Rates(copied, fastest)


def weight_bytes(config: PretrainedConfig, rows: int, dtype: torch.dtype) -> int:
    """Bytes of weights that a decode step of ``rows`` sequences reads."""
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, dtype=dtype)
    tables = [m.weight for m in module.modules() if isinstance(m, nn.Embedding)]
    head = module.get_output_embeddings().weight
    numel = sum(p.numel() for p in module.parameters() if all(p is not t for t in tables))
    numel += head.numel() if any(head is t for t in tables) else 0
    numel += sum(min(rows, len(t)) * t.shape[1] for t in tables)
    return numel * dtype.itemsize


def on_meta(config: PretrainedConfig) -> nn.Module:
    """The model of ``config`` without memory."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def kv_bytes_per_token(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """Bytes of a token's keys and values in all layers."""
    shape = shape_of(on_meta(config))
    return int(2 * shape.num_layers * shape.kv_width) * dtype.itemsize


def state_bytes(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """Bytes of a sequence's recurrent states in all layers."""
    if not holds_states(config):
        return 0
    with by_torch():
        spec = module_spec(on_meta(config).to(dtype))
    return sum(state.nbytes for state in spec.states)


def rollout_bytes(config: PretrainedConfig, case: Case, dtype: torch.dtype) -> dict[str, int]:
    """What the rollout of ``case`` reads; all its sequences decode together."""
    assert case.samples == 1
    assert not case.ragged
    assert case.prompts == case.slots
    per_token, steps = kv_bytes_per_token(config, dtype), case.new_tokens - 1
    tokens = case.prompts * sum(case.prompt_tokens + i for i in range(1, steps + 1))
    states = steps * case.prompts * state_bytes(config, dtype)
    weights = weight_bytes(config, case.prompts, dtype)
    return {
        "decode_steps": steps,
        "floor_step_weights_bytes": weights,
        "floor_kv_per_token_bytes": per_token,
        "floor_kv_decode_bytes": tokens * per_token,  # of all decode steps
        "floor_states_decode_bytes": states,  # of all decode steps
    }


def floor_ms(
    config: PretrainedConfig, case: Case, dtype: torch.dtype, rates: Rates
) -> dict[str, float]:
    """Milliseconds of the rollout of ``case``, of its prefill, and of a mean decode step."""
    read = rollout_bytes(config, case, dtype)
    steps, step_weights = read["decode_steps"], read["floor_step_weights_bytes"]
    prefill_s = step_weights / rates.copy_bytes_per_s
    if rates.matrix_flops_per_s:
        flops = case.prompts * prefill_flops(shape_of(on_meta(config)), case.prompt_tokens)
        prefill_s = max(prefill_s, flops / rates.matrix_flops_per_s)
    decode_bytes = steps * step_weights + read["floor_kv_decode_bytes"]
    decode_bytes += read["floor_states_decode_bytes"]
    decode_s = decode_bytes / rates.copy_bytes_per_s
    return {
        "rollout": 1e3 * (prefill_s + decode_s),
        "prefill": 1e3 * prefill_s,
        "step": 1e3 * decode_s / max(steps, 1),
    }
