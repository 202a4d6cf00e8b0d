"""Collectives of two ranks."""

from pathlib import Path
from typing import Any

import torch
from step_cases import Case
from torch import nn

import dschat.distributed as dist
from dschat.runtime.deepspeed_engine import ZeroSettings, initialize_frozen


def _run(case: Case, models: Path, out: Path) -> dict[str, Any]:
    """``exchanged``: objects of very different sizes, sent to each rank. ``gathered``: whether
    tensors of a few elements and of several pieces arrived whole. ``sharded``: what a layer under
    ZeRO-3 makes of ones, and how often its weight was gathered on the host.
    """
    rank = dist.rank()
    objects = [{"from": rank, "to": to, "text": "x" * 10 ** (3 * rank)} for to in range(2)]
    gathered = []
    for dtype in (torch.float32, torch.bfloat16):
        for size in (1, 7, 5_000_001):
            whole = torch.arange(2 * size).remainder(251).to(dtype)
            output = torch.empty(2 * size, dtype=dtype)
            done = dist.gather_on_host(output, whole[rank * size : (rank + 1) * size])
            gathered.append(done and torch.equal(output, whole))
    return {
        "exchanged": dist.exchange_objects(objects),
        "gathered": dist.gather_objects(gathered),
        "sharded": _through_deepspeed(),
    }


def _through_deepspeed() -> list[Any]:
    layer = nn.Linear(600, 600, bias=False)
    layer.weight.data = torch.arange(360_000.0).remainder(7).view(600, 600)
    frozen = initialize_frozen(layer, ZeroSettings(3, torch.float32).frozen(offload=False))
    calls, original = [], dist.gather_on_host

    def counted(*args: Any) -> bool:
        calls.append(original(*args))
        return calls[-1]

    dist.gather_on_host = counted
    try:
        with torch.no_grad():
            return [frozen(torch.ones(1, 600)).flatten().tolist(), calls]
    finally:
        dist.gather_on_host = original


RUNNERS = {"collectives": _run}
