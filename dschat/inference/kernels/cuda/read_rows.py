"""Triton kernel: reads the rows of a decode step, and computes what its other kernels need of them.

One program for all rows, of which there are hundreds at most.
"""

import triton
import triton.language as tl
from torch import Tensor

from dschat.inference.kernels.cuda import Field
from dschat.inference.kernels.cuda.launch import Launch, follow, release

_ALIVE, _POSITION, _ORIGIN = (
    tl.constexpr(f.value) for f in (Field.ALIVE, Field.POSITION, Field.ORIGIN)
)
_PROMPT, _SAMPLE = tl.constexpr(Field.PROMPT.value), tl.constexpr(Field.SAMPLE.value)
_YOUNGEST_STOP = tl.constexpr(Field.YOUNGEST_STOP.value)


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


def plan(
    fields: Tensor,
    table: Tensor,
    page_size: int,
    trash_page: int,
    numbers: Tensor,
    short: Tensor,
) -> Launch:
    """The launch that writes `read_rows`' results to ``numbers`` and ``short``."""
    assert fields.stride(1) == table.stride(1) == 1
    args = (fields, fields.stride(0), table, table.stride(0), numbers, short)
    size = len(short)
    block = triton.next_power_of_2(size)
    constants = {"PAGE_SIZE": page_size, "BLOCK": block}
    return Launch(_read_rows, (1,), (*args, size, trash_page), constants)
