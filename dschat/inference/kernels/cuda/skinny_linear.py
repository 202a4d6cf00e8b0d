"""Triton kernel: products of up to 64 rows with a large weight, which is read once.

Activation, gate and bias are applied in place. The weight is the left operand, whose tiles are
large enough for tensor cores. Where outputs are too few for all multiprocessors, programs split the
inner dimension; the last one of an output adds up the partial sums in order, so results repeat.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from dschat.inference.kernels.cuda.launch import Launch, arrives_last, follow, operand_type
from dschat.inference.kernels.cuda.operands import ACTIVATIONS, MAX_ROWS, Workspace

_PROGRAMS = 132  # of an H100's multiprocessors


class Config(NamedTuple):
    """Outputs and inputs of a tile, splits of the inputs, and the pipeline's stages."""

    outputs: int
    inputs: int
    splits: int
    num_stages: int


def config(num_outputs: int, num_inputs: int, gated: bool) -> Config:
    """Tiles for a weight: enough programs for every multiprocessor, then the largest tiles.

    Gated outputs need two tiles: of 32 x 128, few programs fit on a multiprocessor at 64 rows.
    """
    outputs = 32 if gated or num_outputs < 48 * _PROGRAMS else 64
    programs, splits = triton.cdiv(num_outputs, outputs), 1
    while splits < 8 and programs * splits <= _PROGRAMS and num_inputs >= 512 * splits:
        splits *= 2
    return Config(outputs, 64 if gated else 128, splits, 4)


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):
    """Formulas of torch: relu, silu, and GELU by erf or tanh, in fp32."""
    if ACTIVATION == "relu":
        x = tl.maximum(x, 0.0)
    elif ACTIVATION == "silu":
        x = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "tanh_gelu":  # (1 + tanh z) / 2 is the sigmoid of 2 z
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return x


@triton.jit
def _tile(pointers, inside, WHOLE: tl.constexpr, TYPE: tl.constexpr):
    if WHOLE:
        return tl.load(pointers).to(TYPE)
    return tl.load(pointers, mask=inside, other=0.0).to(TYPE)


@triton.jit
def _prefetch(pointers):
    """Have lines of 128 bytes brought to the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // $0",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _skinny(
    x_ptr,  # (num_rows, NUM_INPUTS)
    weight_ptr,  # (NUM_OUTPUTS, NUM_INPUTS); gated: (2 NUM_OUTPUTS, NUM_INPUTS)
    bias_ptr,  # (NUM_OUTPUTS,) or twice as many, or None
    y_ptr,  # (num_rows, NUM_OUTPUTS)
    partials_ptr,
    counters_ptr,
    num_rows,  # NOTE: not a constant, which would compile a kernel per batch size
    NUM_INPUTS: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    TYPE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    tile, split = tl.program_id(0), tl.program_id(1)
    SHARE: tl.constexpr = (NUM_INPUTS + SPLITS * INPUTS - 1) // (SPLITS * INPUTS) * INPUTS
    WHOLE: tl.constexpr = NUM_INPUTS % INPUTS == 0
    row, offset = tl.arange(0, ROWS), tl.arange(0, OUTPUTS)
    output = tile * OUTPUTS + offset
    # Outputs and rows beyond the end are computed from others, unmasked, and not stored.
    wrapped = output % NUM_OUTPUTS
    weight_ptrs = weight_ptr + wrapped.to(tl.int64)[:, None] * NUM_INPUTS
    x_ptrs = x_ptr + (row % num_rows)[None, :] * NUM_INPUTS
    begin = split * SHARE
    end = tl.minimum(begin + SHARE, NUM_INPUTS)
    if DEPENDENT:  # the weight is there before the kernel that computes x is done
        LINE: tl.constexpr = 128 // (weight_ptr.dtype.element_ty.primitive_bitwidth // 8)
        ahead = begin + tl.arange(0, STAGES * INPUTS // LINE) * LINE
        lines = weight_ptrs + tl.minimum(ahead, NUM_INPUTS - 1)[None, :]
        _prefetch(lines)
        if GATED:
            _prefetch(lines + NUM_OUTPUTS * NUM_INPUTS)
    follow(DEPENDENT)
    acc = tl.zeros((OUTPUTS, ROWS), tl.float32)
    second = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for start in tl.range(begin, end, INPUTS, num_stages=STAGES):
        k = start + tl.arange(0, INPUTS)
        column = k[None, :]
        x = _tile(x_ptrs + k[:, None], k[:, None] < end, WHOLE, TYPE)
        w = _tile(weight_ptrs + column, column < end, WHOLE, TYPE)
        acc = tl.dot(w, x, acc, input_precision="ieee")
        if GATED:
            w = _tile(weight_ptrs + NUM_OUTPUTS * NUM_INPUTS + column, column < end, WHOLE, TYPE)
            second = tl.dot(w, x, second, input_precision="ieee")
    last = True
    if SPLITS > 1:
        SIZE: tl.constexpr = OUTPUTS * ROWS
        PARTS: tl.constexpr = 2 * SIZE if GATED else SIZE
        first = partials_ptr + tile * SPLITS * PARTS + offset[:, None] * ROWS + row[None, :]
        tl.store(first + split * PARTS, acc)
        if GATED:
            tl.store(first + split * PARTS + SIZE, second)
        last = arrives_last(counters_ptr + tile, SPLITS)
        if last:
            acc = tl.zeros((OUTPUTS, ROWS), tl.float32)
            second = tl.zeros((OUTPUTS, ROWS), tl.float32)
            for other in range(SPLITS):
                acc += tl.load(first + other * PARTS)
                if GATED:
                    second += tl.load(first + other * PARTS + SIZE)
    if last:
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + wrapped).to(tl.float32)[:, None]
            if GATED:
                second += tl.load(bias_ptr + NUM_OUTPUTS + wrapped).to(tl.float32)[:, None]
        if not GATED:
            y = _activated(acc, ACTIVATION)
        elif GATE_FIRST:
            y = _activated(acc, ACTIVATION) * second
        else:
            y = _activated(second, ACTIVATION) * acc
        y_ptrs = y_ptr + row[:, None] * NUM_OUTPUTS + output[None, :]
        inside = (row[:, None] < num_rows) & (output[None, :] < NUM_OUTPUTS)
        tl.store(y_ptrs, tl.trans(y).to(y_ptr.dtype.element_ty), mask=inside)


def plan(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    gated: bool,
    y: Tensor,
    space: Workspace,
    tiles: Config | None = None,
    gate_first: bool = True,
    dependent: bool = False,
) -> Launch:
    """The launch that writes `skinny_linear`'s result to ``y``; ``tiles`` None: `config`."""
    (num_rows, num_inputs), num_outputs = x.shape, y.shape[1]
    assert num_rows <= MAX_ROWS
    assert x.is_contiguous()
    assert weight.is_contiguous()
    tiles = tiles or config(num_outputs, num_inputs, gated)
    rows = max(16, triton.next_power_of_2(num_rows))
    grid = (triton.cdiv(num_outputs, tiles.outputs), tiles.splits)
    if tiles.splits > 1:
        cells = grid[0] * tiles.splits * tiles.outputs * rows * (2 if gated else 1)
        assert cells <= space.partials.numel()
        assert grid[0] <= space.counters.numel()
    constants = {
        "NUM_INPUTS": num_inputs,
        "NUM_OUTPUTS": num_outputs,
        "ACTIVATION": ACTIVATIONS[activation],
        "GATED": gated,
        "GATE_FIRST": gate_first,
        "OUTPUTS": tiles.outputs,
        "INPUTS": tiles.inputs,
        "ROWS": rows,
        "SPLITS": tiles.splits,
        "STAGES": tiles.num_stages,
        "TYPE": operand_type(x.dtype),
        "DEPENDENT": dependent,
    }
    args = (x, weight, bias, y, space.partials, space.counters, num_rows)
    # Two sums of 64 rows would spill in fewer threads (Triton 3.6).
    num_warps = 8 if gated and rows == 64 else 4
    return Launch(_skinny, grid, args, constants, num_warps, tiles.num_stages)
