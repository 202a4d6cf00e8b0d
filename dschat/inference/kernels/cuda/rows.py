"""Triton kernels for the rows of a decode step: read their state, embed their tokens, and move them
to what was drawn. One program reads, and one moves, all rows, of which there are hundreds at most.
"""

import triton
import triton.language as tl
from torch import Tensor

from dschat.inference.kernels.cuda import Field
from dschat.inference.kernels.cuda.launch import Launch, follow, release

_TOKEN, _POSITION, _ALIVE, _ORIGIN, _LAST = (
    tl.constexpr(f.value)
    for f in (Field.TOKEN, Field.POSITION, Field.ALIVE, Field.ORIGIN, Field.LAST)
)
_PROMPT, _SAMPLE = tl.constexpr(Field.PROMPT.value), tl.constexpr(Field.SAMPLE.value)
_YOUNGEST_STOP = tl.constexpr(Field.YOUNGEST_STOP.value)
_COLUMNS = 1024  # of a program of `_embed`


@triton.jit
def _read_rows(
    fields_ptr,  # (fields, S)
    stride,  # S
    table_ptr,  # (S, pages)
    table_stride,
    numbers_ptr,  # (6, size): position, length, slot, prompt, sample, place in the answer
    short_ptr,  # (size,)
    size,
    trash_page,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    follow(DEPENDENT)
    release(DEPENDENT)
    row = tl.arange(0, BLOCK)
    inside = row < size
    field_ptrs = fields_ptr + row
    alive = tl.load(field_ptrs + _ALIVE * stride, mask=inside, other=0)
    drawn_at = tl.load(field_ptrs + _POSITION * stride, mask=inside, other=0)
    position = drawn_at * alive
    page_ptrs = table_ptr + row * table_stride + position // PAGE_SIZE
    page = tl.load(page_ptrs, mask=inside & (alive != 0), other=trash_page)
    origin = tl.load(field_ptrs + _ORIGIN * stride, mask=inside, other=0)
    youngest = tl.load(field_ptrs + _YOUNGEST_STOP * stride, mask=inside, other=0)
    prompt = tl.load(field_ptrs + _PROMPT * stride, mask=inside, other=0)
    sample = tl.load(field_ptrs + _SAMPLE * stride, mask=inside, other=0)
    out = numbers_ptr + row
    tl.store(out, position, mask=inside)
    tl.store(out + size, position + 1, mask=inside)
    tl.store(out + 2 * size, page * PAGE_SIZE + position % PAGE_SIZE, mask=inside)
    tl.store(out + 3 * size, prompt, mask=inside)
    tl.store(out + 4 * size, sample, mask=inside)
    tl.store(out + 5 * size, drawn_at - origin, mask=inside)
    tl.store(short_ptr + row, drawn_at < youngest, mask=inside)


def plan_read(
    fields: Tensor,
    table: Tensor,
    page_size: int,
    trash_page: int,
    numbers: Tensor,
    short: Tensor,
) -> Launch:
    assert fields.stride(1) == table.stride(1) == 1
    args = (fields, fields.stride(0), table, table.stride(0), numbers, short)
    size = len(short)
    constants = {"PAGE_SIZE": page_size, "BLOCK": triton.next_power_of_2(size)}
    return Launch(_read_rows, (1,), (*args, size, trash_page), constants)


@triton.jit
def _embed(
    tokens_ptr,  # (R,)
    table_ptr,  # (V, SIZE)
    positions_ptr,  # (R,), or None
    position_table_ptr,  # (P, SIZE), or None
    out_ptr,  # (R, SIZE)
    OFFSET: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    follow(DEPENDENT)
    release(DEPENDENT)
    row, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    x = tl.load(table_ptr + tl.load(tokens_ptr + row) * SIZE + column, mask=inside)
    if position_table_ptr is not None:
        position = tl.load(positions_ptr + row) + OFFSET
        y = tl.load(position_table_ptr + position * SIZE + column, mask=inside)
        x = (x.to(tl.float32) + y.to(tl.float32)).to(x.dtype)
    tl.store(out_ptr + row.to(tl.int64) * SIZE + column, x, mask=inside)


def plan_embed(
    tokens: Tensor,
    table: Tensor,
    positions: Tensor | None,
    position_table: Tensor | None,
    offset: int,
    out: Tensor,
) -> Launch:
    rows, size = out.shape
    assert table.is_contiguous()
    assert position_table is None or position_table.is_contiguous()
    block = min(_COLUMNS, triton.next_power_of_2(size))
    constants = {"OFFSET": offset, "SIZE": size, "BLOCK": block}
    args = (tokens, table, positions, position_table, out)
    return Launch(_embed, (rows, triton.cdiv(size, block)), args, constants)


@triton.jit
def _advance_rows(
    tokens_ptr,  # (size,)
    logprobs_ptr,  # (size,)
    fields_ptr,  # (fields, S)
    stride,  # S
    ring_ptr,  # (steps, 2, S) float64
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


def plan_advance(
    tokens: Tensor,
    logprobs: Tensor,
    fields: Tensor,
    ring: Tensor,
    step: Tensor,
    stops: Tensor | None,
) -> Launch:
    assert fields.stride(1) == ring.stride(2) == 1
    size = len(tokens)
    args = (tokens, logprobs, fields, fields.stride(0), ring, ring.stride(0), ring.stride(1), step)
    constants = {
        "STEPS": len(ring),
        "NUM_STOPS": 0 if stops is None else stops.shape[1],
        "BLOCK": triton.next_power_of_2(size),
    }
    return Launch(_advance_rows, (1,), (*args, stops, size), constants)
