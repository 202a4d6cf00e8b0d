"""Declares the kernels as torch operators: what each one changes, and the shape that it returns.

Triton is imported when an operator first runs, so that steps can be traced on fake tensors without
it. Operands are checked by each kernel's `plan`.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from dschat.inference.kernels.cuda import DRAW_BLOCK, Workspace


def _operator(*changed: str) -> Callable[[Callable[..., Any]], Any]:
    """Declares a function that changes the arguments ``changed``, and is its own fake version."""

    def declare(function: Callable[..., Any]) -> Any:
        name = f"dschat::{function.__name__}"
        operator = torch.library.custom_op(name, function, mutates_args=changed)
        operator.register_fake(function)
        return operator

    return declare


def _launch(plan: str, *args: Any, **options: Any) -> None:
    """Run what the function ``plan`` of a module here plans; of fake tensors, nothing."""
    if isinstance(args[0], FakeTensor):
        return
    module, _, function = plan.partition(".")
    planned = getattr(import_module(f"{__package__}.{module}"), function)(*args, **options)
    for launch in planned if isinstance(planned, tuple) else (planned,):
        launch.run()


@_operator()
def read_rows(
    fields: Tensor,
    table: Tensor,
    size: int,
    page_size: int,
    trash_page: int,
) -> tuple[Tensor, Tensor]:
    """What a decode step needs to know of its first ``size`` rows.

    Args:
        fields: (fields, S) int64, see `Field`.
        table: (S, pages) int64, pages of each row, of ``page_size`` tokens.
        trash_page: where dead rows are, at position 0.

    Returns:
        Numbers (6, size) int64: position, number of keys, cache slot of the new key and value, and
        the key of the random number (prompt, sample, place in the answer). Then rows that may draw
        no stop token (size,) bool.
    """
    numbers, short = fields.new_empty(6, size), fields.new_empty(size, dtype=torch.bool)
    _launch("rows.plan_read", fields, table, page_size, trash_page, numbers, short)
    return numbers, short


@_operator()
def embed(
    tokens: Tensor,
    table: Tensor,
    positions: Tensor | None,
    position_table: Tensor | None,
    offset: int,
) -> Tensor:
    """Rows of ``table`` (V, E) for ``tokens`` (R,) int64, (R, E); with ``position_table`` (P, E)
    plus its rows for ``positions`` (R,) + ``offset``.
    """
    out = table.new_empty(len(tokens), table.shape[1])
    _launch("rows.plan_embed", tokens, table, positions, position_table, offset, out)
    return out


@_operator("fields", "ring", "step")
def advance_rows(
    tokens: Tensor,
    logprobs: Tensor,
    fields: Tensor,
    ring: Tensor,
    step: Tensor,
    stops: Tensor | None,
) -> None:
    """Write a step's ``tokens`` (B,) int64 and ``logprobs`` (B,) fp32 to the ring, and move the
    rows to these tokens.

    ``fields`` (fields, S) int64, see `Field`; ``ring`` (steps, 2, S) float64; ``step``
    (1,) int64, the number of steps so far; rows end at their ``stops`` (rows, S) int64.
    """
    _launch("rows.plan_advance", tokens, logprobs, fields, ring, step, stops)


@_operator("h")
def add_norm(
    h: Tensor,
    added: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    offset: float = 0.0,
    next_weight: Tensor | None = None,
) -> Tensor:
    """``h`` += ``added``, in place; returns its LayerNorm, or without ``bias`` its RMSNorm.

    ``h`` and ``added`` (R, E), contiguous; ``weight``, to which ``offset`` is added, and ``bias``
    (E,). Returns (R, E). Sums are in fp32.
    """
    out = torch.empty_like(h)
    _launch("add_norm.plan", h, added, weight, bias, eps, out, offset, next_weight)
    return out


@_operator("partials", "counters")
def skinny_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    gated: bool,
    gate_first: bool,
    partials: Tensor,
    counters: Tensor,
    side_a: Tensor | None = None,
    side_b: Tensor | None = None,
) -> Tensor:
    """act(x W^T + b), or if ``gated`` act(x G^T + b) * (x U^T + c), (R, N).

    ``x`` (R, E) of at most `MAX_ROWS` rows, ``weight`` (N, E), or (2 N, E) of the gate G and U in
    either order, ``bias`` (N,) or (2 N,); of one dtype and contiguous, or the transpose of
    ``weight`` is; sums are in fp32. ``side_a`` (r, E) and ``side_b`` (N, r) or (2 N, r), LoRA's
    factors: (x A^T) B^T is added to the product with ``weight``. ``activation`` is a key of
    `ACTIVATIONS`. ``partials`` and ``counters`` are a `Workspace`.
    """
    y = x.new_empty(len(x), len(weight) // (2 if gated else 1))
    space, side = Workspace(partials, counters), None
    if side_a is not None and side_b is not None:
        side = x.new_empty(len(x), len(side_a)), side_b
        _launch("skinny_linear.plan", x, side_a, None, "", False, side[0], space)
    args = x, weight, bias, activation, gated, y, space
    _launch("skinny_linear.plan", *args, gate_first=gate_first, side=side)
    return y


@_operator()
def gate(inner: Tensor, activation: str, gate_first: bool) -> Tensor:
    """act(gate) * up of the halves of ``inner`` (R, 2 I), contiguous: (R, I)."""
    out = inner.new_empty(len(inner), inner.shape[1] // 2)
    _launch("skinny_linear.plan_gate", inner, out, activation, gate_first)
    return out


@_operator()
def choose_experts(logits: Tensor, per_token: int, renormalized: bool) -> tuple[Tensor, Tensor]:
    """The ``per_token`` largest of each row's softmax of ``logits`` (R, N), contiguous, the largest
    first and the first of equal ones: (R, k) int64, and their shares (R, k) fp32, which add up to 1
    if they are ``renormalized``.
    """
    chosen = logits.new_empty(len(logits), per_token, dtype=torch.int64)
    shares = logits.new_empty(len(logits), per_token, dtype=torch.float32)
    _launch("experts.plan_choice", logits, chosen, shares, renormalized)
    return chosen, shares


@_operator()
def experts(
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
) -> Tensor:
    """Each row of ``x`` (R, E) through the experts ``chosen`` (R, k) int64, (R, E): the sum of
    their outputs by ``shares`` (R, k).

    Args:
        up: (N, 2 I, E) of gates and ups, of any strides; ``up_bias`` (N, 2 I).
        down: (N, E, I); ``down_bias`` (N, E).
        gated: "halves": the gates stand before the ups; "pairs": each before its up.
        activation: a key of `ACTIVATIONS`, of act(gate) * up. With a ``factor`` instead: (up + 1) *
            gate * sigmoid(factor * gate), gate and up cut to ``limit``.
    """
    out = torch.empty_like(x)
    inner = x.new_empty(chosen.numel(), down.shape[2])
    outputs = x.new_empty(chosen.numel(), x.shape[1])
    weights, how = (up, up_bias, down, down_bias), (gated, activation, factor, limit)
    _launch("experts.plan", x, chosen, shares, *weights, *how, inner, outputs, out)
    return out


@_operator("rows", "partials", "counters")
def paged_decode(
    heads: Tensor,
    layout: list[int],
    rows: Tensor,
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
    partials: Tensor,
    counters: Tensor,
    next_weight: Tensor | None = None,
) -> Tensor:
    """Attention (B, H * D) of one new token of B sequences; writes its key and value to ``rows``.

    Args:
        heads: (B, H + 2 K, D) query, key and value heads, contiguous, before norm and rotation.
        layout: where they are among each other, see `HeadLayout.origins`.
        rows: (slots, 2 K, D) a layer of the cache, contiguous.
        lengths: (B,) int64, keys that each token attends to, its own included.
        slots: (B,) int64, where its key and value belong.
        table: (B, pages) int64.
        slopes: (H,) fp32, of ALiBi.
        window, chunk, scale, softcap, sinks: see `Scores`; a window includes the token's own key.
        q_norm, k_norm, norm_offset, eps: (D,) weights of the heads' RMS norms, plus the offset.
        cos, sin: (positions, rotary dim), as `Rotary` stores them, of halves or ``adjacent`` ones.
        growth: (positions,), what queries are multiplied by.
        partials, counters: a `Workspace`.
    """
    out = heads.new_empty(heads.shape[0], (heads.shape[1] - rows.shape[1]) * heads.shape[2])
    _launch(
        "paged_decode.plan",
        *(heads, layout, rows, out, lengths, slots, table, page_size, slopes, window, chunk),
        *(scale, softcap, sinks, q_norm, k_norm, norm_offset, eps, cos, sin, adjacent, growth),
        Workspace(partials, counters),
        next_weight=next_weight,
    )
    return out


@_operator()
def draw(
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
) -> tuple[Tensor, Tensor]:
    """Draw a token of each row of ``logits`` (R, V), contiguous, of any floating dtype.

    Args:
        numbers: (3, R) float64, rows contiguous: temperature (1 if greedy), top-p and min-p. In
            memory, as all of these: a captured graph serves every request.
        integers: (3, R) int64 of the same strides: seed, whether it is greedy, top-k (many: all).
        counters: (3, R) int64, contiguous: prompt index, sample index, position.
        greedy: whether rows take the likeliest token, the first of equal ones.
        draws: whether rows draw. Where some do either, the row says which.
        has_top_k, has_top_p, has_min_p: whether these numbers apply to any row.
        short: (R,) bool, rows that may not draw their ``stops``.
        stops: (R, S) int64, contiguous; -1: none.
        num_tokens: ids from this one on are never drawn.

    Returns:
        ids (R,) int64 and log-probs (R,) fp32, as `dschat.inference.sampling.sample`.
    """
    num_rows = len(logits)
    ids, logprobs = counters.new_empty(num_rows), logits.new_empty(num_rows, dtype=torch.float32)
    blocks = logprobs.new_empty(num_rows, 4, -(-logits.shape[1] // DRAW_BLOCK))
    bounds = counters.new_empty(num_rows, 2)
    _launch(
        "draw.plan",
        *(logits, numbers, integers, counters, greedy, draws, has_top_k, has_top_p, has_min_p),
        *(short, stops, num_tokens, blocks, bounds, ids, logprobs),
    )
    return ids, logprobs
