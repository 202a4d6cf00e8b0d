"""Triton kernel: writes what a decode step drew to the ring, and moves its rows to it.

One program for all rows, of which there are hundreds at most.
"""

import triton
import triton.language as tl
from torch import Tensor

from dschat.inference.kernels.cuda import Field
from dschat.inference.kernels.cuda.launch import Launch, follow

_TOKEN, _POSITION = tl.constexpr(Field.TOKEN.value), tl.constexpr(Field.POSITION.value)
_ALIVE, _LAST = tl.constexpr(Field.ALIVE.value), tl.constexpr(Field.LAST.value)


@triton.jit
def _advance_rows(
    tokens_ptr,  # (size,)
    logprobs_ptr,  # (size,)
    fields_ptr,  # (fields, S)
    stride,  # S
    ring_ptr,  # (steps, 2, positions, S) float64
    step_stride,
    kind_stride,
    step_ptr,  # (1,)
    stops_ptr,  # (rows, NUM_STOPS)
    size,
    STEPS: tl.constexpr,
    NUM_STOPS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    follow(DEPENDENT)
    step = tl.load(step_ptr)
    tl.debug_barrier()  # all threads have read it
    tl.store(step_ptr, step + 1)
    row = tl.arange(0, BLOCK)
    inside = row < size
    token = tl.load(tokens_ptr + row, mask=inside, other=0)
    logprob = tl.load(logprobs_ptr + row, mask=inside, other=0.0)
    out = ring_ptr + (step % STEPS) * step_stride + row
    tl.store(out, token.to(tl.float64), mask=inside)
    tl.store(out + kind_stride, logprob.to(tl.float64), mask=inside)
    field_ptrs = fields_ptr + row
    position = tl.load(field_ptrs + _POSITION * stride, mask=inside, other=0)
    last = tl.load(field_ptrs + _LAST * stride, mask=inside, other=0)
    alive = tl.load(field_ptrs + _ALIVE * stride, mask=inside, other=0)
    alive = tl.where(position < last, alive, 0)
    if NUM_STOPS > 0:  # without stops, there is no pointer to compile
        for i in range(NUM_STOPS):
            stop = tl.load(stops_ptr + row * NUM_STOPS + i, mask=inside, other=-1)
            alive = tl.where(token == stop, 0, alive)
    tl.store(field_ptrs + _TOKEN * stride, token, mask=inside)
    tl.store(field_ptrs + _ALIVE * stride, alive, mask=inside)
    tl.store(field_ptrs + _POSITION * stride, position + alive, mask=inside)


def plan(
    tokens: Tensor,
    logprobs: Tensor,
    fields: Tensor,
    ring: Tensor,
    step: Tensor,
    stops: Tensor | None,
) -> Launch:
    """The launch that does what `advance_rows` says."""
    assert fields.stride(1) == ring.stride(3) == 1
    size = len(tokens)
    args = (tokens, logprobs, fields, fields.stride(0), ring, ring.stride(0), ring.stride(1), step)
    constants = {
        "STEPS": len(ring),
        "NUM_STOPS": 0 if stops is None else stops.shape[1],
        "BLOCK": triton.next_power_of_2(size),
    }
    return Launch(_advance_rows, (1,), (*args, stops, size), constants)
