"""Triton's attention over the paged cache, interpreted, against NumPy in float64."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from triton_tensors import assert_close, assert_written, drawn, exact, poisoned

from dschat.inference.kernels.cuda import workspace
from dschat.inference.model.borrowed import HeadLayout
from dschat.inference.model.layers import alibi_slopes

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
    cos = torch.cat([angles.cos()] * 2, 1).to(case.dtype) if case.rotary_dim else None
    sin = torch.cat([-angles.sin(), angles.sin()], 1).to(case.dtype) if case.rotary_dim else None
    norms = [drawn(D, seed=s, dtype=case.dtype) + 1 if case.norms else None for s in (4, 5)]
    return (
        *(drawn(B, H + 2 * K, D, dtype=case.dtype), case.layout.origins, rows),
        poisoned(B, H * D, dtype=case.dtype),
        *(lengths, slots, table, case.page_size, alibi_slopes(H) if case.alibi else None),
        *(case.window, D**-0.5, *norms, EPS, cos, sin, workspace(torch.device("cpu"), 1 << 19)),
        case.splits,
    )


def transformed(x, norm, cos, sin):
    """Heads (n, D): RMS norm, then the rotation of halves."""
    if norm is not None:
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * exact(norm)
    if cos is None:
        return x
    half = len(cos) // 2
    a, b, rest = x[:, :half], x[:, half : 2 * half], x[:, 2 * half :]
    c, s = exact(cos)[:half], exact(sin)[half:]
    return np.concatenate([a * c - b * s, b * c + a * s, rest], axis=1)


def expected(case, args):
    """The outputs and the cache afterwards."""
    heads, _, rows, _, _, slots, table, size, slopes, *_ = args
    q_norm, k_norm, _, cos, sin, _, _ = args[11:]
    K, H = case.kv_heads, case.heads
    cache, outputs = exact(rows).copy(), []
    for b, length in enumerate(case.lengths):
        q, k, v = case.split(exact(heads[b]))
        position = length - 1
        angles = (None, None) if cos is None else (cos[position], sin[position])
        cache[slots[b], :K] = transformed(k, k_norm, *angles)
        cache[slots[b], K:] = v
        where = [table[b, i // size].item() * size + i % size for i in range(length)]
        queries = transformed(q, q_norm, *angles)
        for h in range(H):
            kv = h * K // H
            scores = cache[where, kv] @ queries[h] * case.size**-0.5
            if slopes is not None:
                scores += slopes[h].item() * (np.arange(length) - position)
            if case.window:
                scores[: max(length - case.window, 0)] = -np.inf
            weights = np.exp(scores - scores.max())
            outputs.append(weights / weights.sum() @ cache[where, K + kv])
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
@pytest.mark.parametrize("variant", range(5))
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
        ][variant],
    )
