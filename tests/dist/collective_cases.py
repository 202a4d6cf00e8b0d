"""Collectives of two ranks."""

from pathlib import Path
from typing import Any

import torch
from step_cases import Case

import dschat.distributed as dist


def _run(case: Case, models: Path, out: Path) -> dict[str, Any]:
    """``exchanged``: objects of very different sizes, sent to each rank. ``gathered``: whether
    tensors of a few elements and of several pieces arrived whole.
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
    return {"exchanged": dist.exchange_objects(objects), "gathered": dist.gather_objects(gathered)}


RUNNERS = {"collectives": _run}
