"""Triton kernel: adds to the residual stream in place and normalizes it, one program per row."""

import triton
import triton.language as tl
from torch import Tensor

from dschat.inference.kernels.cuda.launch import Launch


@triton.jit
def _add_norm(
    h_ptr,  # (R, E), overwritten with h + added
    added_ptr,  # (R, E) or None
    weight_ptr,  # (E,)
    bias_ptr,  # (E,); None: RMS norm
    out_ptr,  # (R, E)
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    EPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * SIZE
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    bias = weight
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + column, mask=inside, other=0.0)
    x = tl.load(h_ptr + row + column, mask=inside, other=0.0).to(tl.float32)
    if added_ptr is not None:
        x += tl.load(added_ptr + row + column, mask=inside, other=0.0).to(tl.float32)
        # The norm reads the sum as it is stored, so that later layers see the same numbers.
        total = x.to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + row + column, total, mask=inside)
        x = total.to(tl.float32)
    if bias_ptr is not None:
        x = tl.where(inside, x - tl.sum(x, axis=0) / SIZE, 0.0)
    y = x * tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + EPS) * weight.to(tl.float32)
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
) -> Launch:
    """The launch that writes `add_norm`'s result to ``out``."""
    rows, size = h.shape
    assert h.is_contiguous()
    assert added is None or added.is_contiguous()
    block = triton.next_power_of_2(size)
    constants = {"SIZE": size, "BLOCK": block, "EPS": eps}
    num_warps = min(max(block // 512, 1), 16)  # 16 numbers per thread, up to 8,192 columns
    return Launch(_add_norm, (rows,), (h, added, weight, bias, out), constants, num_warps)
