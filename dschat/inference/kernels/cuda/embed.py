"""Triton kernel: the embeddings of tokens, and of their positions, added up."""

import triton
import triton.language as tl
from torch import Tensor

from dschat.inference.kernels.cuda.launch import Launch, follow, release

_BLOCK = 1024


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


def plan(
    tokens: Tensor,
    table: Tensor,
    positions: Tensor | None,
    position_table: Tensor | None,
    offset: int,
    out: Tensor,
) -> Launch:
    """The launch that writes `embed`'s result to ``out``."""
    rows, size = out.shape
    assert table.is_contiguous()
    assert position_table is None or position_table.is_contiguous()
    block = min(_BLOCK, triton.next_power_of_2(size))
    constants = {"OFFSET": offset, "SIZE": size, "BLOCK": block}
    args = (tokens, table, positions, position_table, out)
    return Launch(_embed, (rows, triton.cdiv(size, block)), args, constants)
