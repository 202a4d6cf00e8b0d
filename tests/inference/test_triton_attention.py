"""Triton's attention over the paged cache, interpreted, against NumPy in float64."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from triton_tensors import assert_close, assert_written, drawn, exact, poisoned

from dschat.inference.kernels.cuda import workspace
from dschat.inference.model.borrowed import HeadLayout
from dschat.inference.model.positions import alibi_slopes

EPS = 1e-2


@dataclass(frozen=True)
class Case:
    heads: int
    kv_heads: int
    size: int
    lengths: tuple[int, ...]
    page_size: int = 16
    splits: int = 1
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: bool = False
    offset: float = 0.0  # of the norms' weights
    adjacent: bool = False  # elements that are rotated
    growth: bool = False  # of queries
    alibi: bool = False
    norms: bool = False
    rotary_dim: int = 0
    order: str = "qkv"  # of blocks of heads; "": q, k and v of a head are adjacent
    dtype: torch.dtype = torch.float32

    @property
    def layout(self):
        return HeadLayout.of(self.heads, self.kv_heads, self.order, interleaved=not self.order)

    def split(self, heads):
        """Queries, keys and values (..., D) of ``heads`` (H + 2 K, D)."""
        H, K = self.heads, self.kv_heads
        if not self.order:
            return heads.reshape(H, 3, -1).swapaxes(0, 1)
        ends = np.cumsum([H if part == "q" else K for part in self.order])
        parts = dict(zip(self.order, np.split(heads, ends[:-1]), strict=True))
        return parts["q"], parts["k"], parts["v"]


def inputs(case):
    """Arguments of `plan`; the cache has garbage in every slot."""
    H, K, D, B = case.heads, case.kv_heads, case.size, len(case.lengths)
    per_sequence = -(-max(case.lengths) // case.page_size)
    num_pages = B * per_sequence + 1
    rows = poisoned(num_pages * case.page_size, 2 * K, D, dtype=case.dtype)
    rows.copy_(drawn(*rows.shape, seed=1))
    lengths = torch.tensor(case.lengths)
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(2))
    table = order[: B * per_sequence].view(B, per_sequence)
    position = lengths - 1
    page = table.gather(1, (position // case.page_size).unsqueeze(1)).squeeze(1)
    slots = page * case.page_size + position % case.page_size
    angles = drawn(max(case.lengths), case.rotary_dim // 2, seed=3)
    pairs = [
        torch.stack(x).to(case.dtype) for x in ([angles.cos()] * 2, [-angles.sin(), angles.sin()])
    ]
    order = (1, 2, 0) if case.adjacent else (1, 0, 2)
    cos, sin = (
        x.permute(order).flatten(1).contiguous() if case.rotary_dim else None for x in pairs
    )
    growth = (1 + drawn(max(case.lengths), seed=6) / 8).to(case.dtype) if case.growth else None
    sinks = drawn(H, seed=7, dtype=case.dtype) if case.sinks else None
    norms = [
        drawn(D, seed=s, dtype=case.dtype) + 1 - case.offset if case.norms else None for s in (4, 5)
    ]
    return (
        *(drawn(B, H + 2 * K, D, dtype=case.dtype), case.layout.origins, rows),
        poisoned(B, H * D, dtype=case.dtype),
        *(lengths, slots, table, case.page_size, alibi_slopes(H) if case.alibi else None),
        *(case.window, case.chunk, D**-0.5, case.softcap, sinks, *norms, case.offset, EPS),
        *(cos, sin, case.adjacent, growth, workspace(torch.device("cpu"), 1 << 19), case.splits),
    )


def transformed(case, x, norm, cos, sin):
    """Heads (n, D): RMS norm, then the rotation of halves, or of adjacent elements."""
    if norm is not None:
        scale = exact(norm) + case.offset
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * scale
    if cos is None:
        return x
    x, half = x.copy(), len(cos) // 2
    first = slice(0, 2 * half, 2) if case.adjacent else slice(half)
    second = slice(1, 2 * half, 2) if case.adjacent else slice(half, 2 * half)
    a, b, c, s = x[:, first].copy(), x[:, second].copy(), exact(cos)[first], exact(sin)[second]
    x[:, first], x[:, second] = a * c - b * s, b * c + a * s
    return x


def expected(case, args):
    """The outputs and the cache afterwards."""
    heads, _, rows, _, _, slots, table, size, slopes, *_ = args
    sinks, q_norm, k_norm, _, _, cos, sin, _, growth, *_ = args[13:]
    K, H = case.kv_heads, case.heads
    cache, outputs = exact(rows).copy(), []
    for b, length in enumerate(case.lengths):
        q, k, v = case.split(exact(heads[b]))
        position = length - 1
        angles = (None, None) if cos is None else (cos[position], sin[position])
        cache[slots[b], :K] = transformed(case, k, k_norm, *angles)
        cache[slots[b], K:] = v
        where = [table[b, i // size].item() * size + i % size for i in range(length)]
        queries = transformed(case, q, q_norm, *angles)
        queries *= 1 if growth is None else exact(growth)[position]
        for h in range(H):
            kv = h * K // H
            scores = cache[where, kv] @ queries[h] * case.size**-0.5
            if case.softcap:
                scores = case.softcap * np.tanh(scores / case.softcap)
            if slopes is not None:
                scores += slopes[h].item() * (np.arange(length) - position)
            if case.window:
                scores[: max(length - case.window, 0)] = -np.inf
            if case.chunk:
                scores[: position // case.chunk * case.chunk] = -np.inf
            if sinks is not None:
                scores = np.append(scores, exact(sinks)[h])
            weights = np.exp(scores - scores.max())
            weights = (weights / weights.sum())[:length]
            outputs.append(weights @ cache[where, K + kv])
    return np.array(outputs).reshape(len(heads), -1), cache


def check(interpreted, case):
    args = inputs(case)
    outputs, cache = expected(case, args)
    before = args[2].clone()
    after = interpreted("run", "paged_decode", args)
    assert_written(after[3], outputs)
    rows, slots = after[2], args[5]
    assert_close(rows[slots], cache[slots.numpy()])
    others = torch.ones(len(rows), dtype=torch.bool)
    others[slots] = False
    assert torch.equal(rows[others], before[others])
    assert_written(rows, cache)
    assert not after[-2].counters.any()  # ready for the next launch


SMALL = Case(2, 2, 64, (1, 17, 70))
GROUPED = Case(6, 2, 64, (130, 1), page_size=64, splits=2, rotary_dim=64, norms=True)

QUICK = {
    "one-key-and-more": SMALL,
    "page-of-7-splits": replace(SMALL, page_size=7, lengths=(2, 66), splits=4),
    "whole-window": replace(SMALL, page_size=90, window=20),
    "keys-first": replace(SMALL, order="kvq", rotary_dim=32),
    "interleaved": replace(SMALL, order="", rotary_dim=16, norms=True),
    "values-first-grouped": replace(GROUPED, order="vkq", lengths=(70,)),
    "whole-shuffled-half": replace(SMALL, page_size=90, dtype=torch.float16, rotary_dim=16),
    "grouped": GROUPED,
    "gemma": replace(GROUPED, offset=1.0, softcap=0.5, window=40),
    "sinks": replace(SMALL, heads=4, sinks=True, rotary_dim=64),
    "sinks-splits": replace(GROUPED, sinks=True, softcap=0.3, norms=False),
    "chunks": replace(SMALL, chunk=16, lengths=(1, 16, 17, 70), growth=True),
    "adjacent": replace(SMALL, rotary_dim=32, adjacent=True, norms=True),
    "grouped-80-alibi": replace(SMALL, heads=4, size=80, alibi=True, lengths=(65, 20)),
    "grouped-brain-float": replace(GROUPED, dtype=torch.bfloat16, lengths=(70,)),
}


@pytest.mark.parametrize("case", QUICK.values(), ids=QUICK)
def test_decode_attention(interpreted, case):
    check(interpreted, case)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 1), (34, 2)])
@pytest.mark.parametrize("variant", range(7))
def test_decode_attention_everywhere(interpreted, dtype, size, heads, kv_heads, variant):
    case = Case(heads, kv_heads, size, (1, 2, 63, 64, 65, 66, 150), dtype=dtype)
    check(
        interpreted,
        [
            replace(case, rotary_dim=size, norms=True, splits=2),
            replace(case, page_size=64, window=64, rotary_dim=size // 4, splits=4),
            replace(case, page_size=7, alibi=True),
            replace(case, page_size=200, window=1, splits=3),
            replace(case, order="kvq" if heads > kv_heads else "", rotary_dim=size),
            replace(case, softcap=2.0, sinks=True, splits=2, rotary_dim=size, adjacent=True),
            replace(case, chunk=64, growth=True, norms=True, offset=1.0, rotary_dim=size),
        ][variant],
    )
