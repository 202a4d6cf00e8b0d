"""Triton kernels of the decoder for CUDA, and what they share with callers: sizes, the fields of a
row, and scratch memory.

They take tensors and sizes; the decoder calls `operators` by `dschat.inference.model.step_kernels`.
No Triton here: callers choose kernels before it loads.
"""

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

MAX_ROWS = 32  # of `skinny_linear`; cuBLAS is faster at 64
MAX_CHOICES = 2048  # of `experts`: rows times experts of each
MAX_HEAD_SIZE = 256  # of `paged_decode`
DRAW_BLOCK = 2048  # tokens of a program of `draw`

# Names of transformers' activations that `skinny_linear` computes; "" is none.
ACTIVATIONS = {
    "": "none",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "tanh_gelu",
    "gelu_fast": "tanh_gelu",
    "gelu_pytorch_tanh": "tanh_gelu",
}

NUM_COUNTERS = 4096  # outputs of one launch that are shared


class Field(IntEnum):
    """An int64 of each row, in the order in which `DecodeState`'s memory has them."""

    TOKEN = 0
    POSITION = 1  # of TOKEN; its key and value are written by the next step
    ALIVE = 2
    ORIGIN = 3  # position from which the random numbers of draws are counted
    LAST = 4  # position that draws the last token
    YOUNGEST_STOP = 5  # first position that may draw a stop token
    PROMPT = 6
    SAMPLE = 7
    STATES = 8  # slot of its recurrent states, in models that have some


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
