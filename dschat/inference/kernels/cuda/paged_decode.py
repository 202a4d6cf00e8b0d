"""Triton kernel: attention of a decode step over the paged KV cache.

One program serves a key-value head of a sequence and the query heads that share it, or a split of
its keys. It normalizes and rotates the new query and key, writes the new key and value to the
cache, and reads lengths and pages from memory: one CUDA graph fits all lengths.

Softmax over blocks of keys: Milakov and Gimelshein 2018, "Online normalizer calculation for
softmax". The new token starts the running sums, so that no program waits for the write to
the cache.

Tensor cores take 16 rows of queries, padding for the most part: products and sums of single rows
were up to four times as many instructions (Triton 3.6), more than memory leaves time for.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from dschat.inference.kernels.cuda import Workspace
from dschat.inference.kernels.cuda.launch import (
    Launch,
    arrives_last,
    fetch,
    follow,
    operand_type,
    parts_to_fetch,
    release,
)

_BLOCK = 32  # keys: a page of the default size
_PROGRAMS = 528  # four per multiprocessor of an H200: fewer (sequence, head) pairs are split
_MOST_SPLITS = 8


@triton.jit
def _head(
    head_ptrs,  # (..., 1): first element of each head
    d,  # (1, D)
    inside,
    norm_ptr,  # (D,) weight of an RMS norm, or None
    cos_ptr,  # (rotary dim,) at the token's position, or None
    sin_ptr,
    D: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    ADJACENT: tl.constexpr,  # whether adjacent elements are rotated, else the halves
    OFFSET: tl.constexpr,  # of the norm's weight
    EPS: tl.constexpr,
):
    """Heads in fp32, normalized and rotated as `Decoder` does."""
    x = tl.load(head_ptrs + d, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0
    if norm_ptr is not None:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / D + EPS)[:, None]
        x *= scale * (tl.load(norm_ptr + d, mask=d < D, other=0.0).to(tl.float32) + OFFSET)
    if cos_ptr is not None:
        HALF: tl.constexpr = ROTARY_DIM // 2
        rotated = d < ROTARY_DIM
        partner = d ^ 1 if ADJACENT else tl.where(d < HALF, d + HALF, d - HALF)
        y = tl.load(head_ptrs + partner, mask=inside & rotated, other=0.0).to(tl.float32)
        if norm_ptr is not None:
            y *= scale * (
                tl.load(norm_ptr + partner, mask=rotated, other=0.0).to(tl.float32) + OFFSET
            )
        cos = tl.load(cos_ptr + d, mask=rotated, other=1.0).to(tl.float32)
        x = x * cos + y * tl.load(sin_ptr + d, mask=rotated, other=0.0).to(tl.float32)
    return x


@triton.jit
def _scores(products, scale, SOFTCAP: tl.constexpr):
    s = products * scale
    if SOFTCAP > 0:  # c tanh(s / c): 2 sigmoid(2 x) - 1 is tanh(x)
        s = SOFTCAP * (2.0 * tl.sigmoid(s * (2.0 / SOFTCAP)) - 1.0)
    return s


@triton.jit
def _store(out_ptrs, acc, m, total, sinks_ptr, heads):
    """A sink is a further score of a head, whose value is zero. ``heads``: their rows and numbers,
    and what of these is not padding.
    """
    _, q_head, is_head, inside = heads
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + q_head, mask=is_head, other=0.0).to(tl.float32)
        largest = tl.maximum(m, sink)
        kept = tl.exp(m - largest)
        total = total * kept + tl.exp(sink - largest)
        acc *= kept
    tl.store(out_ptrs, (acc / total).to(out_ptrs.dtype.element_ty), mask=inside)


@triton.jit
def _paged_decode(
    heads_ptr,  # (B, H + 2 K, D): query, key and value heads, see Q_FIRST
    rows_ptr,  # (slots, 2 K, D): a layer of the cache
    out_ptr,  # (B, H, D)
    lengths_ptr,  # (B,)
    slots_ptr,  # (B,)
    table_ptr,  # (B, pages)
    table_stride,
    slopes_ptr,  # (H,), or None
    sinks_ptr,  # (H,), or None
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,  # (positions, rotary dim), or None
    sin_ptr,
    growth_ptr,  # (positions,) factors of queries, or None
    partials_ptr,  # (B, K, SPLITS, ROWS, D_BLOCK + 2)
    counters_ptr,  # (B, K)
    next_ptr,  # the weight that the next kernel reads, or None
    scale,
    H: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    D_BLOCK: tl.constexpr,
    Q_FIRST: tl.constexpr,  # the first query head of a token; the others follow in steps of STEP
    K_FIRST: tl.constexpr,
    V_FIRST: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,  # query heads per key head, padded
    PAGE_SIZE: tl.constexpr,
    SAME_PAGE: tl.constexpr,  # whether a block of keys lies in one page
    WINDOW: tl.constexpr,  # keys that the token attends to, its own included; 0: all
    CHUNK: tl.constexpr,  # or keys of the same run of so many positions; 0: all
    SOFTCAP: tl.constexpr,  # 0: none
    ROTARY_DIM: tl.constexpr,
    ADJACENT: tl.constexpr,
    OFFSET: tl.constexpr,
    EPS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    TYPE: tl.constexpr,  # of tl.dot's operands
    PARTS: tl.constexpr,
    THREADS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    follow(DEPENDENT)
    b, kv, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    GROUP: tl.constexpr = H // K
    SLOT: tl.constexpr = 2 * K * D
    dtype = rows_ptr.dtype.element_ty
    position = tl.load(lengths_ptr + b) - 1  # of the new token: the number of cached keys
    d = tl.arange(0, D_BLOCK)[None, :]
    row = tl.arange(0, ROWS)[:, None]
    q_head = kv * GROUP + row
    inside_q = (row < GROUP) & (d < D)
    token_ptr = heads_ptr + b.to(tl.int64) * ((H + 2 * K) * D)
    if cos_ptr is not None:
        cos_ptr += position * ROTARY_DIM
        sin_ptr += position * ROTARY_DIM
    q_ptr = token_ptr + (Q_FIRST + q_head * STEP) * D
    q = _head(
        q_ptr, d, inside_q, q_norm_ptr, cos_ptr, sin_ptr, D, ROTARY_DIM, ADJACENT, OFFSET, EPS
    ).to(dtype)
    if growth_ptr is not None:
        q = (q.to(tl.float32) * tl.load(growth_ptr + position).to(tl.float32)).to(dtype)
    slope = 0.0
    if slopes_ptr is not None:
        slope = tl.load(slopes_ptr + q_head, mask=row < GROUP, other=0.0)

    m = tl.full((ROWS, 1), float("-inf"), tl.float32)
    total = tl.zeros((ROWS, 1), tl.float32)
    acc = tl.zeros((ROWS, D_BLOCK), tl.float32)
    if split == 0:  # the new token
        k_ptr = token_ptr + (K_FIRST + kv * STEP) * D + tl.zeros((1, 1), tl.int32)
        new_k = _head(
            k_ptr, d, d < D, k_norm_ptr, cos_ptr, sin_ptr, D, ROTARY_DIM, ADJACENT, OFFSET, EPS
        ).to(dtype)
        v_ptr = token_ptr + (V_FIRST + kv * STEP) * D
        new_v = tl.load(v_ptr + d, mask=d < D, other=0.0)
        slot_ptr = rows_ptr + tl.load(slots_ptr + b) * SLOT + kv * D + d
        tl.store(slot_ptr, new_k, mask=d < D)
        tl.store(slot_ptr + K * D, new_v, mask=d < D)
        product = tl.sum(q.to(tl.float32) * new_k.to(tl.float32), axis=1)[:, None]
        m = _scores(product, scale, SOFTCAP)
        total += 1.0
        acc += new_v.to(tl.float32)

    # Blocks of the cached keys [first, position), shared evenly by the splits.
    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(position + 1 - WINDOW, 0)
    if CHUNK > 0:
        first = position // CHUNK * CHUNK
    begin = first // BLOCK * BLOCK
    share = tl.cdiv(tl.cdiv(position - begin, BLOCK), SPLITS) * BLOCK
    begin += split * share
    for start in range(begin, tl.minimum(begin + share, position), BLOCK):
        key = start + tl.arange(0, BLOCK)
        if SAME_PAGE:
            page = tl.load(table_ptr + b * table_stride + start // PAGE_SIZE)
            slot = page * PAGE_SIZE + start % PAGE_SIZE + tl.arange(0, BLOCK)
        else:
            pages = table_ptr + b * table_stride + key // PAGE_SIZE
            slot = tl.load(pages, mask=key < position, other=0) * PAGE_SIZE + key % PAGE_SIZE
        cached = (key < position) & (key >= first)
        k_ptrs = rows_ptr + slot[:, None] * SLOT + kv * D + d
        inside = cached[:, None] & (d < D)
        k = tl.load(k_ptrs, mask=inside, other=0.0)
        v = tl.load(k_ptrs + K * D, mask=inside, other=0.0)
        s = tl.dot(q.to(TYPE), tl.trans(k.to(TYPE)), input_precision="ieee")
        s = _scores(s, scale, SOFTCAP)
        s += slope * (key - position).to(tl.float32)[None, :]
        s = tl.where(cached[None, :], s, float("-inf"))
        largest = tl.maximum(m, tl.max(s, axis=1)[:, None])
        p = tl.exp(s - largest)
        kept = tl.exp(m - largest)
        total = total * kept + tl.sum(p, axis=1)[:, None]
        acc = acc * kept + tl.dot(p.to(dtype).to(TYPE), v.to(TYPE), input_precision="ieee")
        m = largest

    release(DEPENDENT)
    out_ptrs = out_ptr + (b.to(tl.int64) * H + q_head) * D + d
    heads = (row, q_head, row < GROUP, inside_q)
    if SPLITS > 1:
        WIDTH: tl.constexpr = D_BLOCK + 2
        pair = b * K + kv
        own = partials_ptr + (pair * SPLITS + split) * ROWS * WIDTH + row * WIDTH
        tl.store(own + d, acc, mask=inside_q)
        tl.store(own + D_BLOCK, m, mask=row < GROUP)
        tl.store(own + D_BLOCK + 1, total, mask=row < GROUP)
        if arrives_last(counters_ptr + pair, SPLITS):
            own_ptr = partials_ptr + pair * SPLITS * ROWS * WIDTH
            _combine(own_ptr, d, out_ptrs, sinks_ptr, heads, ROWS, D_BLOCK, SPLITS)
    else:
        _store(out_ptrs, acc, m, total, sinks_ptr, heads)
    fetch(next_ptr, (b * K + kv) * SPLITS + split, PARTS, THREADS)


@triton.jit
def _combine(
    partials_ptr,
    d,
    out_ptrs,
    sinks_ptr,
    heads,
    ROWS: tl.constexpr,
    D_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Merge the splits' sums, in order. Split 0 is never empty, the others may be."""
    WIDTH: tl.constexpr = D_BLOCK + 2
    row, _, is_head, inside = heads
    m = tl.full((ROWS, 1), float("-inf"), tl.float32)
    total = tl.zeros((ROWS, 1), tl.float32)
    acc = tl.zeros((ROWS, D_BLOCK), tl.float32)
    for split in range(SPLITS):
        other = partials_ptr + split * ROWS * WIDTH + row * WIDTH
        other_m = tl.load(other + D_BLOCK, mask=is_head, other=0.0)
        largest = tl.maximum(m, other_m)
        kept, added = tl.exp(m - largest), tl.exp(other_m - largest)
        other_total = tl.load(other + D_BLOCK + 1, mask=is_head, other=0.0)
        total = total * kept + other_total * added
        acc = acc * kept + tl.load(other + d, mask=inside, other=0.0) * added
        m = largest
    _store(out_ptrs, acc, m, total, sinks_ptr, heads)


def num_splits(num_pairs: int, room: int) -> int:
    """Splits of the keys for ``num_pairs`` (sequence, key-value head) pairs: four programs per
    multiprocessor, if there are so few pairs and ``room`` for the partial results.
    """
    splits = 1
    while 2 * splits <= min(_MOST_SPLITS, _PROGRAMS // num_pairs, room):
        splits *= 2
    return splits


def plan(
    heads: Tensor,
    layout: Sequence[int],
    rows: Tensor,
    out: Tensor,
    lengths: Tensor,
    slots: Tensor,
    table: Tensor,
    page_size: int,
    slopes: Tensor | None,
    window: int | None,
    chunk: int | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    norm_offset: float,
    eps: float,
    cos: Tensor | None,
    sin: Tensor | None,
    adjacent: bool,
    growth: Tensor | None,
    space: Workspace,
    splits: int = 0,
    next_weight: Tensor | None = None,
) -> Launch:
    """The launch that writes `paged_decode`'s result to ``out``; ``splits`` 0: `num_splits`."""
    batch, num_kv_heads, size = heads.shape[0], rows.shape[1] // 2, heads.shape[2]
    num_heads = heads.shape[1] - 2 * num_kv_heads
    group = num_heads // num_kv_heads
    padded_rows = max(16, triton.next_power_of_2(group))
    padded_size = max(16, triton.next_power_of_2(size))
    assert heads.is_contiguous()
    assert rows.is_contiguous()
    assert table.stride(1) == 1
    pairs = batch * num_kv_heads
    room = space.partials.numel() // (pairs * padded_rows * (padded_size + 2))
    splits = splits or num_splits(pairs, room)
    assert splits == 1 or (splits <= room and pairs <= space.counters.numel())
    constants = {
        "H": num_heads,
        "K": num_kv_heads,
        "D": size,
        "D_BLOCK": padded_size,
        **dict(zip(("Q_FIRST", "K_FIRST", "V_FIRST", "STEP"), layout, strict=True)),
        "ROWS": padded_rows,
        "PAGE_SIZE": page_size,
        "SAME_PAGE": table.shape[1] == 1 or page_size % _BLOCK == 0,
        "WINDOW": window or 0,
        "CHUNK": chunk or 0,
        "SOFTCAP": softcap or 0.0,
        "ROTARY_DIM": 0 if cos is None else cos.shape[1],
        "ADJACENT": adjacent,
        "OFFSET": norm_offset,
        "EPS": eps,
        "SPLITS": splits,
        "BLOCK": _BLOCK,
        "TYPE": operand_type(heads.dtype),
    }
    args = (
        *(heads, rows, out, lengths, slots, table, table.stride(0)),
        *(slopes, sinks, q_norm, k_norm, cos, sin, growth),
        *(space.partials, space.counters, next_weight, float(scale)),
    )
    grid = (batch, num_kv_heads, splits)
    # So many blocks are under way at once, fewer where many programs share a multiprocessor. A page
    # is looked up as many before its block is copied.
    row_bytes = padded_size * heads.element_size()
    blocks = 2 if row_bytes <= 512 and pairs * splits <= 2 * _PROGRAMS else 1
    stages = 1 + 2 * blocks
    num_warps = 2 if padded_size <= 128 else 4
    constants |= parts_to_fetch(next_weight, num_warps)
    return Launch(_paged_decode, grid, args, constants, num_warps, stages)
