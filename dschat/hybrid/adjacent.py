"""Moves the frozen weights of a fused product back to back, so that one product can read them.

DeepSpeed puts the weights that it trains into flat buffers, where q, k and v are adjacent. A frozen
one keeps the storage in which it was loaded.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from dschat.inference.model.borrowed import are_adjacent


@torch.no_grad()
def place_adjacent(parameters: Mapping[str, nn.Parameter], groups: Iterable[list[str]]) -> int:
    """Give the frozen parameters of each group (names) one buffer; returns the bytes moved.

    Values stay, and addresses change. Groups with a trained, absent or partitioned member are left
    alone. Call it after DeepSpeed's initialize, which allocates ZeRO-3's partitions; extra memory:
    one group.
    """
    num_bytes = 0
    for names in groups:
        members = [parameters[name] for name in names if name in parameters]
        if len(members) < len(names) or any(p.requires_grad for p in members):
            continue
        stored = [_storage_of(p) for p in members]
        first = stored[0]
        is_whole = all(
            t.numel() == getattr(p, "ds_numel", p.numel())
            for t, p in zip(stored, members, strict=True)
        )
        is_alike = all(t.dtype == first.dtype and t.device == first.device for t in stored)
        if not (is_whole and is_alike) or are_adjacent([t.view(-1) for t in stored]):
            continue
        buffer = torch.cat([t.reshape(-1) for t in stored])
        sizes = [t.numel() for t in stored]
        for tensor, part in zip(stored, buffer.split(sizes), strict=True):
            tensor.data = part.view(tensor.shape)
        num_bytes += buffer.nbytes
    return num_bytes


def _storage_of(parameter: nn.Parameter) -> Tensor:
    """What holds the values: the parameter, or under ZeRO-3 its partition."""
    return getattr(parameter, "ds_tensor", parameter)
