"""Triton kernels: the experts of a decode step, each of which reads its weights once.

A program computes outputs of one expert for the rows that chose it, which it finds among the
choices of all rows: no launch depends on how many each expert has. Rows come in blocks of 16 or 32.
As in `skinny_linear`, the weight is the left operand.

A choice is a row and one of its k experts; choice c is of row c // k.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from dschat.inference.kernels.cuda import ACTIVATIONS, MAX_ROWS
from dschat.inference.kernels.cuda.launch import Launch, follow, operand_type, release
from dschat.inference.kernels.cuda.skinny_linear import activated, shared_bytes_of, tile_of

_COLUMNS = 1024  # of a program of `_combine`


class Tiles(NamedTuple):
    """Outputs and inputs of a tile, the pipeline's stages, and warps of a program."""

    outputs: int
    inputs: int
    num_stages: int
    num_warps: int


# Of the first and second product: of 24 on an H200 the fastest, or within 4% of it, for the experts
# of gpt-oss-20b, Qwen3-30B-A3B and Mixtral's size.
_TILES = Tiles(64, 64, 4, 4), Tiles(128, 64, 4, 8)


@triton.jit
def _choose_experts(
    logits_ptr,  # (R, N), the router's
    chosen_ptr,  # (R, K) int64
    shares_ptr,  # (R, K) fp32
    N: tl.constexpr,
    N_BLOCK: tl.constexpr,
    K: tl.constexpr,
    K_BLOCK: tl.constexpr,
    RENORMALIZED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The K largest shares of a softmax, the first of equal ones; one program per row."""
    row, expert, place = tl.program_id(0), tl.arange(0, N_BLOCK), tl.arange(0, K_BLOCK)
    follow(DEPENDENT)
    release(DEPENDENT)
    x = tl.load(logits_ptr + row * N + expert, mask=expert < N, other=float("-inf")).to(tl.float32)
    weights = tl.exp(x - tl.max(x, axis=0))
    total = tl.sum(weights, axis=0)
    weights = tl.where(expert < N, weights, -1.0)
    chosen = tl.zeros((K_BLOCK,), tl.int64)
    shares = tl.zeros((K_BLOCK,), tl.float32)
    for k in tl.static_range(K):
        largest = tl.max(weights, axis=0)
        first = tl.min(tl.where(weights == largest, expert, N - 1), axis=0)  # if NaN the last
        chosen = tl.where(place == k, first.to(tl.int64), chosen)
        shares = tl.where(place == k, largest, shares)
        weights = tl.where(expert == first, -1.0, weights)
    if RENORMALIZED:
        total = tl.where(total == total, tl.sum(shares, axis=0), total)  # a largest is never NaN
    tl.store(chosen_ptr + row * K + place, chosen, mask=place < K)
    tl.store(shares_ptr + row * K + place, shares / total, mask=place < K)


@triton.jit
def _gated(gate, up, ACTIVATION: tl.constexpr, FACTOR: tl.constexpr, LIMIT: tl.constexpr):
    """act(gate) * up, or with a factor (up + 1) * gate * sigmoid(factor * gate), cut to a limit."""
    if FACTOR > 0:
        gate, up = tl.minimum(gate, LIMIT), tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        return gate * tl.sigmoid(FACTOR * gate) * (up + 1.0)
    return activated(gate, ACTIVATION) * up


@triton.jit
def _expert_product(
    x_ptr,  # (R, NUM_INPUTS), or (R K, NUM_INPUTS), see SHARED
    chosen_ptr,  # (R K,) int64
    weight_ptr,  # (N, outputs, NUM_INPUTS) of any strides; outputs: as many of gates and of ups
    bias_ptr,  # (N, outputs), or None
    y_ptr,  # (R K, NUM_OUTPUTS)
    num_choices,
    expert_stride,
    K: tl.constexpr,
    CHOICES: tl.constexpr,  # at most, padded
    NUM_INPUTS: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr,
    OUTPUT_STRIDE: tl.constexpr,
    INPUT_STRIDE: tl.constexpr,
    SHARED: tl.constexpr,  # whether the choices of a row read one row of x
    GATED: tl.constexpr,  # "", "halves" or "pairs": gates stand before the ups, or each before its
    ACTIVATION: tl.constexpr,
    FACTOR: tl.constexpr,
    LIMIT: tl.constexpr,
    OUTPUTS: tl.constexpr,  # of a tile; of pairs as many gates and ups
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    TYPE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    tile, expert = tl.program_id(0), tl.program_id(1)
    WIDTH: tl.constexpr = 2 * OUTPUTS if GATED == "pairs" else OUTPUTS
    ALL: tl.constexpr = 2 * NUM_OUTPUTS if GATED != "" else NUM_OUTPUTS
    UPS: tl.constexpr = NUM_OUTPUTS if GATED == "halves" else 0
    WHOLE: tl.constexpr = NUM_INPUTS % INPUTS == 0
    # Outputs beyond the end are computed from others and not stored.
    wide = (tile * WIDTH + tl.arange(0, WIDTH)) % (NUM_OUTPUTS if GATED == "halves" else ALL)
    weight_ptr += expert.to(tl.int64) * expert_stride
    weight_ptrs = weight_ptr + wide.to(tl.int64)[:, None] * OUTPUT_STRIDE
    choice, slot = tl.arange(0, CHOICES), tl.arange(0, ROWS)
    follow(DEPENDENT)
    is_own = tl.load(chosen_ptr + choice, mask=choice < num_choices, other=-1) == expert
    place = tl.cumsum(is_own.to(tl.int32), axis=0) - 1
    count = tl.sum(is_own.to(tl.int32), axis=0)
    for first in range(0, count, ROWS):
        is_mine = is_own[None, :] & (place[None, :] == first + slot[:, None])
        own = tl.sum(tl.where(is_mine, choice[None, :], 0), axis=1)  # choices of this block
        source = own // K if SHARED else own
        x_ptrs = x_ptr + source.to(tl.int64)[None, :] * NUM_INPUTS
        acc = tl.zeros((WIDTH, ROWS), tl.float32)
        second = tl.zeros((WIDTH, ROWS), tl.float32)
        for start in tl.range(0, NUM_INPUTS, INPUTS, num_stages=STAGES):
            k = start + tl.arange(0, INPUTS)
            w_ptrs = weight_ptrs + k[None, :] * INPUT_STRIDE
            x = tile_of(x_ptrs + k[:, None], k[:, None] < NUM_INPUTS, WHOLE, TYPE)
            w = tile_of(w_ptrs, k[None, :] < NUM_INPUTS, WHOLE, TYPE)
            acc = tl.dot(w, x, acc, input_precision="ieee")
            if UPS > 0:
                w_ptrs += UPS * OUTPUT_STRIDE
                w = tile_of(w_ptrs, k[None, :] < NUM_INPUTS, WHOLE, TYPE)
                second = tl.dot(w, x, second, input_precision="ieee")
        if bias_ptr is not None:
            bias_ptrs = bias_ptr + expert * ALL + wide
            acc += tl.load(bias_ptrs).to(tl.float32)[:, None]
            if UPS > 0:
                second += tl.load(bias_ptrs + UPS).to(tl.float32)[:, None]
        y = tl.trans(acc)
        if GATED == "halves":
            y = _gated(y, tl.trans(second), ACTIVATION, FACTOR, LIMIT)
        elif GATED == "pairs":
            gate, up = tl.split(tl.reshape(y, (ROWS, OUTPUTS, 2)))
            y = _gated(gate, up, ACTIVATION, FACTOR, LIMIT)
        output = tile * OUTPUTS + tl.arange(0, OUTPUTS)
        y_ptrs = y_ptr + own.to(tl.int64)[:, None] * NUM_OUTPUTS + output[None, :]
        inside = (first + slot[:, None] < count) & (output[None, :] < NUM_OUTPUTS)
        tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=inside)
    release(DEPENDENT)


@triton.jit
def _combine(
    y_ptr,  # (R K, SIZE)
    shares_ptr,  # (R, K)
    out_ptr,  # (R, SIZE)
    K: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The sum of a row's outputs by their shares."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    follow(DEPENDENT)
    release(DEPENDENT)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(K):
        choice = row * K + k
        y = tl.load(y_ptr + choice * SIZE + column, mask=column < SIZE, other=0.0)
        total += tl.load(shares_ptr + choice).to(tl.float32) * y.to(tl.float32)
    out_ptrs = out_ptr + row * SIZE + column
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=column < SIZE)


def plan_choice(logits: Tensor, chosen: Tensor, shares: Tensor, renormalized: bool) -> Launch:
    (rows, count), per_token = logits.shape, chosen.shape[1]
    assert logits.is_contiguous()
    constants = {
        "N": count,
        "N_BLOCK": triton.next_power_of_2(count),
        "K": per_token,
        "K_BLOCK": triton.next_power_of_2(per_token),
        "RENORMALIZED": renormalized,
    }
    return Launch(_choose_experts, (rows,), (logits, chosen, shares), constants, num_warps=1)


def plan(
    x: Tensor,
    chosen: Tensor,
    shares: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    gated: str,
    activation: str,
    factor: float,
    limit: float,
    inner: Tensor,
    outputs: Tensor,
    out: Tensor,
) -> tuple[Launch, ...]:
    """The launches that write `experts`'s result to ``out``, (R, E); ``inner`` (R K, I) and
    ``outputs`` (R K, E): what they write before.
    """
    (rows, per_token), size = chosen.shape, x.shape[1]
    for tensor in (x, chosen, shares, inner, outputs, out):
        assert tensor.is_contiguous()
    how = {
        "GATED": gated,
        "ACTIVATION": ACTIVATIONS[activation],
        "FACTOR": factor,
        "LIMIT": limit,
    }
    plain = {"GATED": "", "ACTIVATION": "none", "FACTOR": 0.0, "LIMIT": 0.0}
    first = x, chosen, up, up_bias, inner
    second = inner, chosen, down, down_bias, outputs
    combine = Launch(
        _combine,
        (rows, triton.cdiv(size, _COLUMNS)),
        (outputs, shares, out),
        {"K": per_token, "SIZE": size, "BLOCK": min(_COLUMNS, triton.next_power_of_2(size))},
    )
    return (
        _product(*first, how | {"SHARED": True}, _TILES[0]),
        _product(*second, plain | {"SHARED": False}, _TILES[1]),
        combine,
    )


def _product(
    x: Tensor,
    chosen: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    y: Tensor,
    how: dict[str, object],
    tiles: Tiles,
) -> Launch:
    (count, _, num_inputs), num_choices = weight.shape, chosen.numel()
    num_outputs = y.shape[1]
    rows = 16 if num_choices <= 16 * count else MAX_ROWS  # as many as an expert has on average
    tile_bytes = (tiles.outputs * weight.shape[1] // num_outputs + rows) * tiles.inputs
    most = shared_bytes_of(x.device) // (tile_bytes * x.element_size())
    stages = min(tiles.num_stages, most)
    assert bias is None or bias.is_contiguous()
    constants = {
        "K": chosen.shape[1],
        "CHOICES": max(triton.next_power_of_2(num_choices), 16),
        "NUM_INPUTS": num_inputs,
        "NUM_OUTPUTS": num_outputs,
        "OUTPUT_STRIDE": weight.stride(1),
        "INPUT_STRIDE": weight.stride(2),
        **how,
        "OUTPUTS": tiles.outputs,
        "INPUTS": tiles.inputs,
        "ROWS": rows,
        "STAGES": stages,
        "TYPE": operand_type(x.dtype),
    }
    grid = (triton.cdiv(num_outputs, tiles.outputs), count)
    args = x, chosen, weight, bias, y, num_choices, weight.stride(0)
    return Launch(_expert_product, grid, args, constants, tiles.num_warps, stages)
