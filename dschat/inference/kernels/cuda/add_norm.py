"""Triton kernel: adds to the residual stream in place and normalizes it, one program per row."""

import triton
import triton.language as tl
from torch import Tensor

from dschat.inference.kernels.cuda.launch import Launch, fetch, follow, parts_to_fetch, release


@triton.jit
def _add_norm(
    h_ptr,  # (R, E), overwritten with h + added
    added_ptr,  # (R, E) or None
    weight_ptr,  # (E,)
    bias_ptr,  # (E,); None: RMS norm
    out_ptr,  # (R, E)
    next_ptr,  # the weight that the next kernel reads, or None
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,  # of the weight
    PARTS: tl.constexpr,
    THREADS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The last programs bring the next weight to the L2 cache, while memory is idle."""
    program, num_rows = tl.program_id(0), tl.num_programs(0) - PARTS
    if program < num_rows:
        _row(h_ptr, added_ptr, weight_ptr, bias_ptr, out_ptr, SIZE, BLOCK, EPS, OFFSET, DEPENDENT)
    else:
        fetch(next_ptr, program - num_rows, PARTS, THREADS)


@triton.jit
def _row(
    h_ptr,
    added_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * SIZE
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    bias = weight
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + column, mask=inside, other=0.0)
    follow(DEPENDENT)
    release(DEPENDENT)  # so few programs leave the next kernel room
    x = tl.load(h_ptr + row + column, mask=inside, other=0.0).to(tl.float32)
    if added_ptr is not None:
        x += tl.load(added_ptr + row + column, mask=inside, other=0.0).to(tl.float32)
        # The norm reads the sum as it is stored, so that later layers see the same numbers.
        total = x.to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + row + column, total, mask=inside)
        x = total.to(tl.float32)
    if bias_ptr is not None:
        x = tl.where(inside, x - tl.sum(x, axis=0) / SIZE, 0.0)
    y = x * tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + EPS) * (weight.to(tl.float32) + OFFSET)
    if bias_ptr is not None:
        y += bias.to(tl.float32)
    tl.store(out_ptr + row + column, y.to(out_ptr.dtype.element_ty), mask=inside)


def plan(
    h: Tensor,
    added: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    out: Tensor,
    offset: float = 0.0,
    next_weight: Tensor | None = None,
) -> Launch:
    rows, size = h.shape
    assert h.is_contiguous()
    assert added is None or added.is_contiguous()
    block = triton.next_power_of_2(size)
    num_warps = min(max(block // 512, 1), 16)  # 16 numbers per thread, up to 8,192 columns
    fetched = parts_to_fetch(next_weight, num_warps)
    constants = {"SIZE": size, "BLOCK": block, "EPS": eps, "OFFSET": offset, **fetched}
    args = (h, added, weight, bias, out, next_weight)
    return Launch(_add_norm, (rows + fetched["PARTS"],), args, constants, num_warps)
