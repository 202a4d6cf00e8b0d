"""Allocates the memory in which programs that share an output leave partial results."""

from dataclasses import dataclass

import torch
from torch import Tensor

NUM_COUNTERS = 4096  # outputs of one launch that are shared


@dataclass(frozen=True)
class Workspace:
    """NOTE: launches that share a workspace must be on one stream."""

    partials: Tensor  # (size,) fp32
    counters: Tensor  # (NUM_COUNTERS,) int32, zero between launches


def workspace(device: torch.device, size: int = 1 << 21) -> Workspace:
    """Memory for ``size`` partial results, allocated outside captured graphs."""
    with torch.inference_mode(False):
        return Workspace(
            torch.empty(size, dtype=torch.float32, device=device),
            torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=device),
        )
