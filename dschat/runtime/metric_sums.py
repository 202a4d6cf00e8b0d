"""Sums metrics over micro-batches and reads them from the device once.

On a GPU every read waits for the work queued before it. A read in each micro-batch would leave the
device idle until the host has queued the next one.
"""

import torch
from torch import Tensor

DeviceSums = dict[str, Tensor]  # 0-d, any dtype, without gradient


def sum_parts(parts: list[DeviceSums]) -> dict[str, float]:
    """Sum of every name over the micro-batches that have it, in float64 and in their order."""
    named = [item for part in parts for item in part.items()]
    if not named:
        return {}
    tensors = [tensor for _, tensor in named]
    joined = torch.empty(len(tensors), dtype=torch.float64, device=tensors[0].device)
    values = torch.stack(tensors, out=joined).tolist()
    sums: dict[str, float] = {}
    for (name, _), value in zip(named, values, strict=True):
        sums[name] = sums.get(name, 0.0) + value
    return sums
