"""Sequence parallelism on two ranks, against one rank for each row: case ``sequence_parallel`` of a
model.
"""

from pathlib import Path
from typing import Any

import torch
from step_cases import Case
from tiny_models import IDS, LATENT, SMALL, VOCAB, causal_lm, randomized
from transformers import AutoConfig, AutoModelForCausalLM

import dschat.distributed as dist
from dschat.models.heads import LanguageModel
from dschat.models.packing import PackedRows, pack

_GEMMA = {"num_key_value_heads": 1, "head_dim": 16, "sliding_window": 4}
OTHERS = {
    "gemma2": _GEMMA,
    "deepseek_v3": LATENT,
    "cohere": {"num_key_value_heads": 2},
    "llama4_text": {  # chunks, and queries scaled by their columns
        "layer_types": ["chunked_attention", "full_attention"],
        "no_rope_layers": [1, 0],
        "attention_chunk_size": 6,
        "floor_scale": 4,
        "num_local_experts": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "intermediate_size_mlp": 48,
    },
}


def _model(name: str) -> torch.nn.Module:
    if name not in OTHERS:
        return causal_lm(name)
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **IDS | SMALL | {"intermediate_size": 48} | OTHERS[name])
    return randomized(AutoModelForCausalLM.from_config(config, dtype=torch.float32))


def _rows(kind: str) -> PackedRows:
    """This rank's; "long": one rank has a row that is longer than both ranks' share of tokens, the
    other none.
    """
    draw = torch.Generator().manual_seed(dist.rank())

    def ids(count: int) -> list[int]:
        return torch.randint(2, VOCAB, (count,), generator=draw).tolist()

    if kind == "long":
        rows, prompts = [ids(60)] if dist.rank() else [], [0]
    else:
        shared = ids(9)
        rows = [ids(5), shared + ids(7), shared + ids(3), ids(1), ids(20 + 20 * dist.rank())]
        prompts = [0, 9, 9, 0, 0]
    return pack(rows, [range(max(0, len(row) - 4), len(row)) for row in rows], prompts)


def _run(case: Case, models: Path, out: Path) -> dict[str, Any]:
    """By rows: the largest difference of log-probs and entropies, and of gradients, summed over the
    ranks, relative to the largest of each parameter.
    """
    gaps = {}
    for kind in ("ragged", "long"):
        model, rows = _model(case.model), _rows(kind)
        results, grads = [], []
        for size in (1, 2):
            packed = LanguageModel(model, parallel=size)
            logprobs, entropy = packed(rows, 0.7, True)
            model.zero_grad()
            (logprobs.sum() - 0.3 * entropy.square().sum()).backward()
            results.append(torch.cat([logprobs, entropy]).detach())
            grads.append([dist.all_reduce_sum(p.grad.clone()) for p in model.parameters()])
        of_values = (results[0] - results[1]).abs().max() if results[0].numel() else 0.0
        pairs = zip(*grads, strict=True)
        of_grads = max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs)
        gaps[kind] = [max(dist.gather_objects(float(of_values))), of_grads]
    return gaps


RUNNERS = {"sequence_parallel": _run}
