"""Triton kernel: products of up to 32 rows with a large weight, which is read once.

Activation, gate, bias and LoRA's second factor are applied in place (with more rows `gate` applies
the first two). The weight is the left operand, whose tiles are large enough for tensor cores. Where
outputs are too few for all multiprocessors, programs split the inner dimension; the last one of an
output adds up the partial sums in order, so results repeat.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dschat.inference.kernels.cuda import ACTIVATIONS, MAX_ROWS, Workspace
from dschat.inference.kernels.cuda.launch import (
    Launch,
    arrives_last,
    follow,
    operand_type,
    prefetch,
    release,
)

_PROGRAMS = 96  # enough for the 132 multiprocessors of an H200 to read at its full rate


class Config(NamedTuple):
    """Outputs and inputs of a tile, splits of the inputs, and the pipeline's stages."""

    outputs: int
    inputs: int
    splits: int
    num_stages: int


def config(
    num_outputs: int, num_inputs: int, gated: bool, itemsize: int, shared_bytes: int, rows: int = 16
) -> Config:
    """Tiles for a weight, on a device whose programs may share so much memory: of up to 60 on an
    H200 the fastest, or within 3% of it, for most sizes of OPT-1.3B and Llama-8B.
    """
    is_large = max(num_outputs, num_inputs) >= 2048
    outputs, inputs = (64, 128) if is_large else (32, 64)
    programs, splits = triton.cdiv(num_outputs, outputs), 1
    while splits < 8 and programs * splits < _PROGRAMS and num_inputs >= 4 * inputs * splits:
        splits *= 2
    stages = 4 if gated or splits > 1 else 6
    tile_bytes = (outputs * (2 if gated else 1) + rows) * inputs * itemsize
    return Config(outputs, inputs, splits, min(stages, shared_bytes // tile_bytes))


@cache
def shared_bytes_of(device: torch.device) -> int:
    """What a program may have; on a CPU, where launches are only planned, as on an H100."""
    if device.type != "cuda":
        return 227 * 1024
    found = torch.cuda.get_device_properties(device)
    return int(getattr(found, "shared_memory_per_block_optin", 99 * 1024))  # older torch: the least


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
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
def _result(first, second, ACTIVATION: tl.constexpr, GATED: tl.constexpr, GATE_FIRST: tl.constexpr):
    if not GATED:
        y = activated(first, ACTIVATION)
    elif GATE_FIRST:
        y = activated(first, ACTIVATION) * second
    else:
        y = activated(second, ACTIVATION) * first
    return y


@triton.jit
def _gate(
    inner_ptr,  # (R, 2 SIZE)
    out_ptr,  # (R, SIZE)
    SIZE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    follow(DEPENDENT)
    release(DEPENDENT)
    first_ptrs = inner_ptr + row * (2 * SIZE) + column
    first = tl.load(first_ptrs, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(first_ptrs + SIZE, mask=inside, other=0.0).to(tl.float32)
    y = _result(first, second, ACTIVATION, True, GATE_FIRST)
    tl.store(out_ptr + row * SIZE + column, y.to(out_ptr.dtype.element_ty), mask=inside)


def plan_gate(inner: Tensor, out: Tensor, activation: str, gate_first: bool) -> Launch:
    rows, size = out.shape
    assert inner.is_contiguous()
    block = min(triton.next_power_of_2(size), 1024)
    constants = {
        "SIZE": size,
        "ACTIVATION": ACTIVATIONS[activation],
        "GATE_FIRST": gate_first,
        "BLOCK": block,
    }
    return Launch(_gate, (rows, triton.cdiv(size, block)), (inner, out), constants)


@triton.jit
def tile_of(pointers, inside, WHOLE: tl.constexpr, TYPE: tl.constexpr):
    if WHOLE:
        return tl.load(pointers).to(TYPE)
    return tl.load(pointers, mask=inside, other=0.0).to(TYPE)


@triton.jit
def _firsts(begin, SIZE: tl.constexpr, STEP: tl.constexpr, END: tl.constexpr):
    """Every ``STEP``th of ``SIZE`` indices, at most the last one."""
    return tl.minimum(begin + tl.arange(0, (SIZE + STEP - 1) // STEP) * STEP, END - 1)


@triton.jit
def _prefetch_tile(line_ptrs, second, GATED: tl.constexpr):
    prefetch(line_ptrs)
    if GATED:
        prefetch(line_ptrs + second)


@triton.jit
def _add_side(
    acc,
    factor_ptrs,  # (OUTPUTS, 1), rows of LoRA's second factor
    side_ptrs,  # (1, ROWS), rows of what it multiplies
    LORA_RANK: tl.constexpr,
    RANK_TILE: tl.constexpr,
    TYPE: tl.constexpr,
):
    for start in range(0, LORA_RANK, RANK_TILE):
        k = start + tl.arange(0, RANK_TILE)
        side = tl.load(side_ptrs + k[:, None], mask=k[:, None] < LORA_RANK, other=0.0).to(TYPE)
        factor = tl.load(factor_ptrs + k[None, :], mask=k[None, :] < LORA_RANK, other=0.0).to(TYPE)
        acc = tl.dot(factor, side, acc, input_precision="ieee")
    return acc


@triton.jit
def _skinny(
    x_ptr,  # (num_rows, NUM_INPUTS)
    weight_ptr,  # (NUM_OUTPUTS, NUM_INPUTS) of any strides; gated: (2 NUM_OUTPUTS, NUM_INPUTS)
    bias_ptr,  # (NUM_OUTPUTS,) or twice as many, or None
    y_ptr,  # (num_rows, NUM_OUTPUTS)
    side_ptr,  # (num_rows, LORA_RANK), what LoRA's second factor multiplies, or None
    factor_ptr,  # (NUM_OUTPUTS, LORA_RANK) or twice as many, LoRA's second factor
    partials_ptr,
    counters_ptr,
    num_rows,  # NOTE: not a constant, which would compile a kernel per batch size
    NUM_INPUTS: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr,
    OUTPUT_STRIDE: tl.constexpr,
    INPUT_STRIDE: tl.constexpr,
    LORA_RANK: tl.constexpr,
    RANK_TILE: tl.constexpr,  # of a tile
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
    weight_ptrs = weight_ptr + wrapped.to(tl.int64)[:, None] * OUTPUT_STRIDE
    x_ptrs = x_ptr + (row % num_rows)[None, :] * NUM_INPUTS
    begin = split * SHARE
    end = tl.minimum(begin + SHARE, NUM_INPUTS)
    if DEPENDENT:  # on the way while this waits; more than one tile made steps slower
        LINE: tl.constexpr = 1024 // weight_ptr.dtype.element_ty.primitive_bitwidth
        if INPUT_STRIDE == 1:
            lines = weight_ptrs + _firsts(begin, INPUTS, LINE, NUM_INPUTS)[None, :]
        else:
            lines = weight_ptr + _firsts(tile * OUTPUTS, OUTPUTS, LINE, NUM_OUTPUTS)[:, None]
            lines += _firsts(begin, INPUTS, 1, NUM_INPUTS)[None, :] * INPUT_STRIDE
        _prefetch_tile(lines, NUM_OUTPUTS * OUTPUT_STRIDE, GATED)
    follow(DEPENDENT)
    acc = tl.zeros((OUTPUTS, ROWS), tl.float32)
    second = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for start in tl.range(begin, end, INPUTS, num_stages=STAGES):
        k = start + tl.arange(0, INPUTS)
        column = k[None, :]
        w_ptrs = weight_ptrs + column * INPUT_STRIDE
        x = tile_of(x_ptrs + k[:, None], k[:, None] < end, WHOLE, TYPE)
        w = tile_of(w_ptrs, column < end, WHOLE, TYPE)
        acc = tl.dot(w, x, acc, input_precision="ieee")
        if GATED:
            w = tile_of(w_ptrs + NUM_OUTPUTS * OUTPUT_STRIDE, column < end, WHOLE, TYPE)
            second = tl.dot(w, x, second, input_precision="ieee")
    if side_ptr is not None and split == 0:
        side_ptrs = side_ptr + (row % num_rows)[None, :] * LORA_RANK
        factor_ptrs = factor_ptr + wrapped[:, None] * LORA_RANK
        acc = _add_side(acc, factor_ptrs, side_ptrs, LORA_RANK, RANK_TILE, TYPE)
        if GATED:
            factor_ptrs += NUM_OUTPUTS * LORA_RANK
            second = _add_side(second, factor_ptrs, side_ptrs, LORA_RANK, RANK_TILE, TYPE)
    release(DEPENDENT)
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
        y = _result(acc, second, ACTIVATION, GATED, GATE_FIRST)
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
    side: tuple[Tensor, Tensor] | None = None,
) -> Launch:
    """The launch that writes `skinny_linear`'s result to ``y``; ``tiles`` None: `config`. ``side``:
    (R, r) and (N, r), the product of which is added to that with ``weight``.
    """
    (num_rows, num_inputs), num_outputs = x.shape, y.shape[1]
    assert num_rows <= MAX_ROWS
    assert x.is_contiguous()
    assert weight.is_contiguous() or weight.T.is_contiguous()
    rows = 16 if num_rows <= 16 else MAX_ROWS  # as tensor cores take them
    sizes = num_outputs, num_inputs, gated, x.element_size()
    tiles = tiles or config(*sizes, shared_bytes_of(x.device), rows)
    grid = (triton.cdiv(num_outputs, tiles.outputs), tiles.splits)
    if tiles.splits > 1:
        cells = grid[0] * tiles.splits * tiles.outputs * rows * (2 if gated else 1)
        assert cells <= space.partials.numel()
        assert grid[0] <= space.counters.numel()
    rank = 0 if side is None else side[0].shape[1]
    assert side is None or (side[0].is_contiguous() and side[1].is_contiguous())
    constants = {
        "NUM_INPUTS": num_inputs,
        "NUM_OUTPUTS": num_outputs,
        "LORA_RANK": rank,
        "RANK_TILE": min(max(triton.next_power_of_2(rank), 16), 64),
        **dict(zip(("OUTPUT_STRIDE", "INPUT_STRIDE"), weight.stride(), strict=True)),
        "ACTIVATION": ACTIVATIONS[activation],
        "GATED": gated,
        "GATE_FIRST": gate_first,
        "OUTPUTS": tiles.outputs,
        "INPUTS": tiles.inputs,
        "ROWS": rows,
        "SPLITS": tiles.splits,
        "STAGES": tiles.num_stages,
        "TYPE": operand_type(x.dtype),
    }
    added = (None, None) if side is None else side
    args = (x, weight, bias, y, *added, space.partials, space.counters, num_rows)
    return Launch(_skinny, grid, args, constants, num_stages=tiles.num_stages)
