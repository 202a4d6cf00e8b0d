"""Triton kernels: draw the next token of each row from its logits, and its log-prob.

`mass` sums up blocks of the vocabulary, `choose` finds the block and then the token at which the
cumulative probability exceeds a random number: the same tokens and log-probs as
`dschat.inference.sampling.sample`, except where rounding moves a boundary across that number. The
random number is `dschat.inference.sampling.uniforms`, to the bit. No top-k, top-p or min-p here.
"""

import triton
import triton.language as tl
from torch import Tensor

from dschat.inference import sampling
from dschat.inference.kernels.cuda.launch import Launch
from dschat.inference.kernels.cuda.operators import DRAW_BLOCK

# NOTE: Triton reads a literal above 2^63 as uint64.
_GAMMA = tl.constexpr(sampling._GAMMA + (1 << 64))
_MIX_1 = tl.constexpr(sampling._MIX_1 + (1 << 64))
_MIX_2 = tl.constexpr(sampling._MIX_2 + (1 << 64))


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    return x ^ (x >> 31)


@triton.jit
def uniform(seed, prompt, sample, position):
    """`dschat.inference.sampling.uniforms` of int64 counters: float64 in [0, 1)."""
    state = seed.to(tl.uint64, bitcast=True)
    for counter in tl.static_range(3):
        value = prompt if counter == 0 else sample if counter == 1 else position
        state = _mix(state + _GAMMA) + value.to(tl.uint64, bitcast=True) * _GAMMA
    return (_mix(state + _GAMMA) >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2^-53


@triton.jit
def _logits(
    row_ptr,
    block,
    row,
    short_ptr,
    stops_ptr,
    NUM_STOPS: tl.constexpr,
    VOCAB: tl.constexpr,
    NUM_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of logits in fp32: all of them, and those that may be drawn; others are -inf."""
    token = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(row_ptr + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
    allowed = token < NUM_TOKENS
    if NUM_STOPS > 0:
        short = tl.load(short_ptr + row) != 0
        for i in range(NUM_STOPS):
            allowed = allowed & ~(short & (token == tl.load(stops_ptr + i)))
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
    stops_ptr,  # (NUM_STOPS,)
    blocks_ptr,  # (R, 4, blocks): largest and mass of allowed logits, then of all
    temperature_ptr,  # (1,) float64
    NUM_STOPS: tl.constexpr,
    VOCAB: tl.constexpr,
    NUM_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    temperature = tl.load(temperature_ptr).to(tl.float32)
    row, block, num_blocks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    row_ptr = logits_ptr + row.to(tl.int64) * VOCAB
    x, allowed = _logits(
        row_ptr, block, row, short_ptr, stops_ptr, NUM_STOPS, VOCAB, NUM_TOKENS, BLOCK
    )
    out = blocks_ptr + row * 4 * num_blocks + block
    largest, mass = _largest_and_mass(allowed, temperature)
    tl.store(out, largest)
    tl.store(out + num_blocks, mass)
    largest, mass = _largest_and_mass(x, temperature)
    tl.store(out + 2 * num_blocks, largest)
    tl.store(out + 3 * num_blocks, mass)


@triton.jit
def _choose(
    logits_ptr,
    short_ptr,
    stops_ptr,
    blocks_ptr,
    temperature_ptr,
    counters_ptr,  # (3, R): prompt, sample, position
    seed_ptr,  # (1,)
    ids_ptr,  # (R,)
    logprobs_ptr,  # (R,)
    GREEDY: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    ALL_BLOCKS: tl.constexpr,  # NUM_BLOCKS, padded
    NUM_STOPS: tl.constexpr,
    VOCAB: tl.constexpr,
    NUM_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    exact_temperature = tl.load(temperature_ptr)
    temperature = exact_temperature.to(tl.float32)
    row, num_rows = tl.program_id(0), tl.num_programs(0)
    block = tl.arange(0, ALL_BLOCKS)
    present = block < NUM_BLOCKS
    block_ptr = blocks_ptr + row * 4 * NUM_BLOCKS + block
    largest = tl.load(block_ptr, mask=present, other=float("-inf"))
    best = tl.max(largest, axis=0)
    mass = tl.load(block_ptr + NUM_BLOCKS, mask=present, other=0.0)
    mass = (mass * tl.exp((largest - best) / temperature)).to(tl.float64)
    sums = tl.cumsum(mass, axis=0)
    if GREEDY:
        target = best.to(tl.float64) * 0
        chosen = tl.min(tl.where(largest == best, block, NUM_BLOCKS - 1), axis=0)
    else:
        where = counters_ptr + row
        target = uniform(
            tl.load(seed_ptr),
            tl.load(where),
            tl.load(where + num_rows),
            tl.load(where + 2 * num_rows),
        ) * tl.sum(mass, axis=0)
        # NOTE: the last block with mass if the sums round below the target.
        last = tl.max(tl.where(mass > 0, block, 0), axis=0)
        chosen = tl.minimum(tl.sum((sums <= target).to(tl.int32), axis=0), last)
    here = block == chosen
    before = tl.sum(tl.where(here, sums - mass, 0.0), axis=0)
    share = tl.sum(tl.where(here, mass, 0.0), axis=0)

    # Inside the block, relative to its own largest logit: its weights do not underflow.
    row_ptr = logits_ptr + row.to(tl.int64) * VOCAB
    _, allowed = _logits(
        row_ptr, chosen, row, short_ptr, stops_ptr, NUM_STOPS, VOCAB, NUM_TOKENS, BLOCK
    )
    origin = tl.max(allowed, axis=0)
    offset = tl.arange(0, BLOCK)
    if GREEDY:
        offset = tl.min(tl.where(allowed == origin, offset, BLOCK - 1), axis=0)
    else:
        weights = tl.exp((allowed - origin) / temperature).to(tl.float64)
        inside = tl.cumsum(weights, axis=0)
        target = (target - before) / share * tl.sum(weights, axis=0)
        last = tl.max(tl.where(weights > 0, offset, 0), axis=0)
        offset = tl.minimum(tl.sum((inside <= target).to(tl.int32), axis=0), last)
    token = tl.minimum(chosen * BLOCK + offset, NUM_TOKENS - 1)
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
    temperature: Tensor,
    greedy: bool,
    seed: Tensor,
    counters: Tensor,
    short: Tensor | None,
    stops: Tensor | None,
    num_tokens: int,
    blocks: Tensor,
    ids: Tensor,
    logprobs: Tensor,
) -> tuple[Launch, Launch]:
    """The launches that write `draw`'s results to ``ids`` and ``logprobs``. ``blocks`` (R, 4,
    vocabulary / 2,048, rounded up) fp32 is scratch.
    """
    num_rows, vocab = logits.shape
    assert logits.is_contiguous()
    num_blocks = triton.cdiv(vocab, DRAW_BLOCK)
    assert blocks.shape == (num_rows, 4, num_blocks)
    shared = {
        "NUM_STOPS": 0 if stops is None or short is None else len(stops),
        "VOCAB": vocab,
        "NUM_TOKENS": num_tokens,
        "BLOCK": DRAW_BLOCK,
    }
    own = {
        "GREEDY": greedy,
        "NUM_BLOCKS": num_blocks,
        "ALL_BLOCKS": max(triton.next_power_of_2(num_blocks), 2),
    }
    args = (logits, short, stops, blocks, temperature)
    chosen = (*args, counters, seed, ids, logprobs)
    return (
        Launch(_mass, (num_rows, num_blocks), args, shared),
        Launch(_choose, (num_rows,), chosen, shared | own),
    )
