"""Triton kernels: draw the next token of each row from its logits, and its log-prob.

`mass` sums up blocks of the vocabulary, `choose` finds the block and then the token at which the
cumulative probability exceeds a random number: the same tokens and log-probs as
`dschat.inference.sampling.sample`, except where rounding moves a boundary across that number. The
random number is `dschat.inference.sampling.uniforms`, to the bit.

With top-k, top-p or min-p, `threshold` runs between the two: it finds the smallest logit that is
kept by bisection over the bit patterns of logits, without a sort. Of equal logits at that bound the
first tokens are kept, as many as `dschat.inference.sampling.truncate` keeps.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dschat.inference.kernels.cuda import DRAW_BLOCK
from dschat.inference.kernels.cuda.launch import Launch, follow, release, uniform

_BLOCK = tl.constexpr(DRAW_BLOCK)

# Low bits of an fp32 number that no number of the dtype has.
_SPARE_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


@triton.jit
def _logits(of_row, block, NUM_STOPS: tl.constexpr, NUM_TOKENS: tl.constexpr):
    """A block of logits in fp32: all of them, and those that may be drawn; others are -inf.

    ``of_row``: its number, where its logits are and how many, whether it may draw its stops, and
    these.
    """
    row, row_ptr, VOCAB, short_ptr, stops_ptr = of_row
    token = block * _BLOCK + tl.arange(0, _BLOCK)
    x = tl.load(row_ptr + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
    allowed = token < NUM_TOKENS
    if NUM_STOPS > 0:
        short = tl.load(short_ptr + row) != 0
        for i in range(NUM_STOPS):
            allowed = allowed & ~(short & (token == tl.load(stops_ptr + row * NUM_STOPS + i)))
    return x, tl.where(allowed, x, float("-inf"))


@triton.jit
def _largest_and_mass(x, temperature):
    """The largest x, or 0 where all are -inf, and the sum of exp((x - largest) / T)."""
    largest = tl.max(x, axis=0)
    origin = tl.where(largest == float("-inf"), 0.0, largest)
    return largest, tl.sum(tl.exp((x - origin) / temperature), axis=0)


@triton.jit
def _mass(
    logits_ptr,  # (R, VOCAB)
    short_ptr,  # (R,): rows that may not draw a stop
    stops_ptr,  # (R, NUM_STOPS)
    blocks_ptr,  # (R, 4, blocks): largest and mass of allowed logits, then of all
    numbers_ptr,  # (3, R) float64: temperature, top-p, min-p
    NUM_STOPS: tl.constexpr,
    VOCAB: tl.constexpr,
    NUM_TOKENS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    follow(DEPENDENT)
    row, block, num_blocks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    temperature = tl.load(numbers_ptr + row).to(tl.float32)
    of_row = (row, logits_ptr + row.to(tl.int64) * VOCAB, VOCAB, short_ptr, stops_ptr)
    x, allowed = _logits(of_row, block, NUM_STOPS, NUM_TOKENS)
    out = blocks_ptr + row * 4 * num_blocks + block
    largest, mass = _largest_and_mass(allowed, temperature)
    tl.store(out, largest)
    tl.store(out + num_blocks, mass)
    ALLOWED: tl.constexpr = 0 if NUM_STOPS > 0 else NUM_TOKENS
    if (block + 1) * _BLOCK > ALLOWED:  # else the same
        largest, mass = _largest_and_mass(x, temperature)
    release(DEPENDENT)
    tl.store(out + 2 * num_blocks, largest)
    tl.store(out + 3 * num_blocks, mass)


@triton.jit
def _rank(x, SPARE_BITS: tl.constexpr):
    """An int64 for each fp32 number, in the order of the numbers."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SPARE_BITS).to(tl.int64)


@triton.jit
def _reached(
    bound,
    best,
    temperature,
    of_row,
    NUM_BLOCKS: tl.constexpr,
    SPARE_BITS: tl.constexpr,
    NUM_STOPS: tl.constexpr,
    NUM_TOKENS: tl.constexpr,
):
    """How many tokens have a rank of at least ``bound``, and how many a higher one; then the mass
    of both, relative to ``best``, in float64.
    """
    # Sums of each place in the block, so that threads meet once.
    ranks = tl.zeros((_BLOCK,), tl.int64)
    count, above = ranks.to(tl.int32), ranks.to(tl.int32)
    mass, mass_above = ranks.to(tl.float32), ranks.to(tl.float32)
    for block in range(NUM_BLOCKS):
        _, x = _logits(of_row, block, NUM_STOPS, NUM_TOKENS)
        ranks = _rank(x, SPARE_BITS)
        weights = tl.exp((x - best) / temperature)
        count += (ranks >= bound).to(tl.int32)
        above += (ranks > bound).to(tl.int32)
        mass += tl.where(ranks >= bound, weights, 0.0)
        mass_above += tl.where(ranks > bound, weights, 0.0)
    return (
        tl.sum(count, axis=0),
        tl.sum(above, axis=0),
        tl.sum(mass.to(tl.float64), axis=0),
        tl.sum(mass_above.to(tl.float64), axis=0),
    )


@triton.jit
def _highest(
    bound,
    high,
    wanted,
    BY_MASS: tl.constexpr,
    best,
    temperature,
    of_row,
    NUM_BLOCKS: tl.constexpr,
    SPARE_BITS: tl.constexpr,
    NUM_STOPS: tl.constexpr,
    NUM_TOKENS: tl.constexpr,
):
    """The highest rank from ``bound`` to ``high`` that the ``wanted`` tokens, or mass, reach."""
    while bound < high:
        middle = (bound + high + 1) >> 1
        count, _, mass, _ = _reached(
            middle, best, temperature, of_row, NUM_BLOCKS, SPARE_BITS, NUM_STOPS, NUM_TOKENS
        )
        suffices = (mass if BY_MASS else count) >= wanted
        bound = tl.where(suffices, middle, bound)
        high = tl.where(suffices, high, middle - 1)
    return bound


@triton.jit
def _threshold(
    logits_ptr,
    short_ptr,
    stops_ptr,
    blocks_ptr,  # largest and mass of allowed logits; afterwards of the kept ones
    numbers_ptr,
    integers_ptr,  # (3, R) int64: seed, whether it is greedy, top-k
    stride,  # of both
    bounds_ptr,  # (R, 2) int64: the smallest rank that is kept, the last token kept of this rank
    HAS_TOP_K: tl.constexpr,
    HAS_TOP_P: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    ALL_BLOCKS: tl.constexpr,
    SPARE_BITS: tl.constexpr,
    NUM_STOPS: tl.constexpr,
    VOCAB: tl.constexpr,
    NUM_TOKENS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    follow(DEPENDENT)
    row, temperature = tl.program_id(0), tl.load(numbers_ptr + tl.program_id(0)).to(tl.float32)
    of_row = (row, logits_ptr + row.to(tl.int64) * VOCAB, VOCAB, short_ptr, stops_ptr)
    block_ptr = blocks_ptr + row * 4 * NUM_BLOCKS
    columns = tl.arange(0, ALL_BLOCKS)
    largest_of_blocks = tl.load(block_ptr + columns, mask=columns < NUM_BLOCKS, other=float("-inf"))
    best = tl.max(largest_of_blocks, axis=0)
    top = _rank(best, SPARE_BITS)
    bound = _rank(best * 0 + float("-inf"), SPARE_BITS) + 1  # of the smallest finite logit
    ties = top * 0 + VOCAB  # that are kept at the bound, at most
    if HAS_TOP_K:
        top_k = tl.minimum(tl.load(integers_ptr + 2 * stride + row), VOCAB)
        bound = _highest(
            bound, top, top_k, False, best, temperature, of_row,
            NUM_BLOCKS, SPARE_BITS, NUM_STOPS, NUM_TOKENS,
        )  # fmt: skip
    count, above, mass, mass_above = _reached(
        bound, best, temperature, of_row, NUM_BLOCKS, SPARE_BITS, NUM_STOPS, NUM_TOKENS
    )
    if HAS_TOP_K:
        ties = (top_k - above).to(tl.int64)
    if HAS_TOP_P:
        at_bound = tl.maximum(count - above, 1)
        share = tl.minimum(ties, at_bound).to(tl.float64) / at_bound.to(tl.float64)
        target = tl.load(numbers_ptr + stride + row) * (mass_above + (mass - mass_above) * share)
        lowest = bound
        bound = _highest(
            bound, top, target, True, best, temperature, of_row,
            NUM_BLOCKS, SPARE_BITS, NUM_STOPS, NUM_TOKENS,
        )  # fmt: skip
        ties = tl.where(bound > lowest, VOCAB, ties)
        count, above, mass, mass_above = _reached(
            bound, best, temperature, of_row, NUM_BLOCKS, SPARE_BITS, NUM_STOPS, NUM_TOKENS
        )
        each = (mass - mass_above) / tl.maximum(count - above, 1).to(tl.float64)
        wanted = tl.minimum((target - mass_above) / tl.maximum(each, 1e-300), VOCAB)
        ties = tl.minimum(ties, tl.maximum(tl.ceil(wanted).to(tl.int64), 1))
    if HAS_MIN_P:  # relative to the likeliest token, whose weight is 1
        least = tl.load(numbers_ptr + 2 * stride + row)
        likely = top
        for block in range(NUM_BLOCKS):
            _, x = _logits(of_row, block, NUM_STOPS, NUM_TOKENS)
            is_likely = tl.exp((x - best) / temperature) >= least
            likely = tl.minimum(likely, tl.min(tl.where(is_likely, _rank(x, SPARE_BITS), top)))
        ties = tl.where(likely > bound, VOCAB, ties)
        bound = tl.maximum(likely, bound)

    seen = bound * 0  # tokens at the bound
    last = seen - 1
    for block in range(NUM_BLOCKS):
        _, x = _logits(of_row, block, NUM_STOPS, NUM_TOKENS)
        rank = _rank(x, SPARE_BITS)
        is_tie = rank == bound
        is_kept_tie = is_tie & (seen + tl.cumsum(is_tie.to(tl.int64), axis=0) <= ties)
        token = block * _BLOCK + tl.arange(0, _BLOCK)
        last = tl.maximum(last, tl.max(tl.where(is_kept_tie, token, -1), axis=0).to(tl.int64))
        seen += tl.sum(is_tie.to(tl.int64), axis=0)
        kept = tl.where((rank > bound) | is_kept_tie, x, float("-inf"))
        largest_kept, mass_kept = _largest_and_mass(kept, temperature)
        tl.store(block_ptr + block, largest_kept)
        tl.store(block_ptr + NUM_BLOCKS + block, mass_kept)
    tl.store(bounds_ptr + 2 * row, bound)
    tl.store(bounds_ptr + 2 * row + 1, last)


@triton.jit
def _choose(
    logits_ptr,
    short_ptr,
    stops_ptr,
    blocks_ptr,
    numbers_ptr,
    integers_ptr,
    stride,
    bounds_ptr,  # `threshold`'s, or None
    counters_ptr,  # (3, R): prompt, sample, position
    ids_ptr,  # (R,)
    logprobs_ptr,  # (R,)
    GREEDY: tl.constexpr,  # whether rows take the likeliest token
    DRAWS: tl.constexpr,  # whether rows draw
    NUM_BLOCKS: tl.constexpr,
    ALL_BLOCKS: tl.constexpr,  # NUM_BLOCKS, padded
    SPARE_BITS: tl.constexpr,
    NUM_STOPS: tl.constexpr,
    VOCAB: tl.constexpr,
    NUM_TOKENS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    follow(DEPENDENT)
    row, num_rows = tl.program_id(0), tl.num_programs(0)
    exact_temperature = tl.load(numbers_ptr + row)
    temperature = exact_temperature.to(tl.float32)
    block = tl.arange(0, ALL_BLOCKS)
    present = block < NUM_BLOCKS
    block_ptr = blocks_ptr + row * 4 * NUM_BLOCKS + block
    largest = tl.load(block_ptr, mask=present, other=float("-inf"))
    best = tl.max(largest, axis=0)
    mass = tl.load(block_ptr + NUM_BLOCKS, mask=present, other=0.0)
    mass = (mass * tl.exp((largest - best) / temperature)).to(tl.float64)
    sums = tl.cumsum(mass, axis=0)
    target = best.to(tl.float64) * 0
    likeliest = tl.min(tl.where(largest == best, block, NUM_BLOCKS - 1), axis=0)
    chosen = likeliest
    if DRAWS:
        where = counters_ptr + row
        target = uniform(
            tl.load(integers_ptr + row),
            tl.load(where),
            tl.load(where + num_rows),
            tl.load(where + 2 * num_rows),
        ) * tl.sum(mass, axis=0)
        # NOTE: the last block with mass if the sums round below the target.
        last = tl.max(tl.where(mass > 0, block, 0), axis=0)
        chosen = tl.minimum(tl.sum((sums <= target).to(tl.int32), axis=0), last)
        if GREEDY:
            chosen = tl.where(tl.load(integers_ptr + stride + row) != 0, likeliest, chosen)
    here = block == chosen
    before = tl.sum(tl.where(here, sums - mass, 0.0), axis=0)
    share = tl.sum(tl.where(here, mass, 0.0), axis=0)

    # Inside the block, relative to its own largest logit: its weights do not underflow.
    row_ptr = logits_ptr + row.to(tl.int64) * VOCAB
    of_row = (row, row_ptr, VOCAB, short_ptr, stops_ptr)
    _, allowed = _logits(of_row, chosen, NUM_STOPS, NUM_TOKENS)
    place = tl.arange(0, _BLOCK)
    if bounds_ptr is not None:
        rank, bound = _rank(allowed, SPARE_BITS), tl.load(bounds_ptr + 2 * row)
        last_tie = tl.load(bounds_ptr + 2 * row + 1)
        is_kept_tie = (rank == bound) & (chosen * _BLOCK + place <= last_tie)
        allowed = tl.where((rank > bound) | is_kept_tie, allowed, float("-inf"))
    origin = tl.max(allowed, axis=0)
    likeliest = tl.min(tl.where(allowed == origin, place, _BLOCK - 1), axis=0)
    offset = likeliest
    if DRAWS:
        weights = tl.exp((allowed - origin) / temperature).to(tl.float64)
        inside = tl.cumsum(weights, axis=0)
        target = (target - before) / share * tl.sum(weights, axis=0)
        last = tl.max(tl.where(weights > 0, place, 0), axis=0)
        offset = tl.minimum(tl.sum((inside <= target).to(tl.int32), axis=0), last)
        if GREEDY:
            offset = tl.where(tl.load(integers_ptr + stride + row) != 0, likeliest, offset)
    token = tl.minimum(chosen * _BLOCK + offset, NUM_TOKENS - 1)
    tl.store(ids_ptr + row, token.to(tl.int64))

    # The log-prob is of all logits, whether they may be drawn or not.
    largest = tl.load(block_ptr + 2 * NUM_BLOCKS, mask=present, other=float("-inf"))
    best = tl.max(largest, axis=0)
    mass = tl.load(block_ptr + 3 * NUM_BLOCKS, mask=present, other=0.0)
    total = tl.sum((mass * tl.exp((largest - best) / temperature)).to(tl.float64), axis=0)
    logit = tl.load(row_ptr + token).to(tl.float64)
    logprob = (logit - best) / exact_temperature - tl.log(total)
    tl.store(logprobs_ptr + row, logprob.to(tl.float32))


def plan(
    logits: Tensor,
    numbers: Tensor,
    integers: Tensor,
    counters: Tensor,
    greedy: bool,
    draws: bool,
    has_top_k: bool,
    has_top_p: bool,
    has_min_p: bool,
    short: Tensor | None,
    stops: Tensor | None,
    num_tokens: int,
    blocks: Tensor,
    bounds: Tensor,
    ids: Tensor,
    logprobs: Tensor,
) -> tuple[Launch, ...]:
    """The launches that write `draw`'s results to ``ids`` and ``logprobs``. Scratch: ``blocks`` (R,
    4, vocabulary / 2,048, rounded up) fp32 and ``bounds`` (R, 2) int64.
    """
    num_rows, vocab = logits.shape
    assert logits.is_contiguous()
    assert numbers.stride() == integers.stride() == (numbers.stride(0), 1)
    num_blocks = triton.cdiv(vocab, DRAW_BLOCK)
    assert blocks.shape == (num_rows, 4, num_blocks)
    shared = {
        "NUM_STOPS": 0 if stops is None or short is None else stops.shape[1],
        "VOCAB": vocab,
        "NUM_TOKENS": num_tokens,
    }
    of_row = shared | {
        "NUM_BLOCKS": num_blocks,
        "ALL_BLOCKS": max(triton.next_power_of_2(num_blocks), 2),
        "SPARE_BITS": _SPARE_BITS[logits.dtype],
    }
    kept = {"HAS_TOP_K": has_top_k, "HAS_TOP_P": has_top_p, "HAS_MIN_P": has_min_p}
    truncates = draws and any(kept.values())
    args = (logits, short, stops, blocks, numbers)
    mass = Launch(_mass, (num_rows, num_blocks), args, shared)
    columns = integers, integers.stride(0)
    chosen = (*args, *columns, bounds if truncates else None, counters, ids, logprobs)
    choose = Launch(_choose, (num_rows,), chosen, of_row | {"GREEDY": greedy, "DRAWS": draws})
    if not truncates:
        return mass, choose
    truncated = (*args, *columns, bounds)
    threshold = Launch(_threshold, (num_rows,), truncated, of_row | kept, num_warps=8)
    return mass, threshold, choose
