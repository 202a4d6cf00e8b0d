"""Attention over packed rows, registered with transformers under the name ``dschat``.

Every prefix and every answer attends causally to itself; an answer also attends to its prefix. The
two parts are joined by their log-sum-exps. Backward runs the
kernel's own backward on each part with the joined output and log-sum-exp, which gives the exact
gradient of the whole: it recomputes probabilities as exp(scores - log-sum-exp), as ring attention
does (arXiv 2310.01889).
A head's sink (gpt-oss) is one more part: a key for all queries, whose value is 0.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from dschat.models.packing.kernels import (
    CPU,
    CPU_DTYPES,
    META,
    PLAIN,
    MetaKernel,
    Saved,
    Scores,
    SegmentKernel,
    capped,
    join,
    per_query_head,
    plain,
)
from dschat.models.packing.segments import Segments
from dschat.models.packing.varlen import VarlenKernel

NAME = "dschat"

# Arguments of transformers' attention functions that change scores in other ways, or select keys.
UNSUPPORTED = ("position_bias", "head_mask", "indices", "block_indices")

# Families whose masks have a window or chunks of which their attention is not told.
WINDOW_IN_MASK = ("llama4_text", "phimoe", "qwen2_moe")

_BLOCK = 256  # queries that read the keys of their window in one call, at least


class UnsupportedAttentionError(ValueError):
    """A model asks attention for something that packed rows do not have."""


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    segments: Segments | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    positions: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface. Without ``segments`` it is what its ``sdpa`` is, and its
    ``eager`` where that has a softcap or sinks.

    Args:
        query: (1, H, N, D); key, value: (1, K, N, D), where K divides H.
        softcap, s_aux: see `Scores`; ``s_aux`` are the sinks.
        positions: (N,) of the tokens of ``segments``.

    Returns:
        (1, N, H, D), and None for the weights.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    segments = segments or getattr(attention_mask, "segments", None)  # Nemotron drops keywords
    if segments is None:
        if softcap is None and s_aux is None:
            given = module, query, key, value, attention_mask, dropout, scaling
            return sdpa_attention_forward(*given, **others)[0], None
        if attention_mask is None:  # as torch's is_causal; a single query reads all keys
            full = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
            attention_mask = full.tril(key.shape[2] - query.shape[2])
        key, value = per_query_head(key, query), per_query_head(value, query)
        how = Scores(scale, None, softcap, s_aux, dropout=dropout)
        output = _masked(query, key, value, attention_mask, how)
        return output.transpose(1, 2).contiguous(), None
    for name in UNSUPPORTED:
        if others.get(name) is not None:
            raise UnsupportedAttentionError(f"{type(module).__name__} uses {name}")
    if positions is not None:
        query = tuned(module, query, positions)
    spread = segments.spread
    if spread is not None:
        query, key, value = spread.to_heads(query, key, value)
        s_aux = None if s_aux is None else spread.own_heads(s_aux)
    size = value.shape[-1]
    window, chunk = reach(module, sliding_window)
    how = Scores(scale, window, softcap, s_aux, chunk, dropout)
    window, chunk = how.within(segments.longest)
    how = how._replace(window=window, chunk=chunk)
    if dropout or how.chunk or (how.window and not _flash_takes(query, segments, how)):
        output = _sequence_by_sequence(query, key, value, segments, how)
    else:
        heads = padded_heads(query, key, value)
        output = PackedAttention.apply(*heads, segments, scale, softcap, s_aux, how.window)
    output = output[..., :size]
    if spread is not None:
        output = spread.to_tokens(output)
    # NOTE: contiguous, as transformers' own: some families take a view of it.
    return output.transpose(1, 2).contiguous(), None


def tuned(module: Any, query: Tensor, positions: Tensor) -> Tensor:
    """``query``; of Llama 4, whose layers without RoPE scale it by the places in the stream, scaled
    by ``positions`` instead.
    """
    if not getattr(module, "attn_temperature_tuning", False) or module.use_rope:
        return query

    def scales(places: Tensor) -> Tensor:
        steps = ((places.float() + 1) / module.floor_scale).floor()
        return steps.log1p() * module.attn_scale + 1

    change = scales(positions) / scales(torch.arange(len(positions), device=positions.device))
    return query * change.to(query.dtype).unsqueeze(1)


def reach(module: Any, window: int | None) -> tuple[int | None, int | None]:
    """The window and the chunk of a layer's attention; None: it has none."""
    config: Any = getattr(module, "config", None)
    chunk = None
    if getattr(config, "model_type", None) in WINDOW_IN_MASK:
        kinds = getattr(config, "layer_types", None)
        kind = kinds[module.layer_idx] if kinds else "sliding_attention"
        window = config.sliding_window if kind == "sliding_attention" else None
        chunk = config.attention_chunk_size if kind == "chunked_attention" else None
    return window or None, chunk or None


@contextmanager
def attention_named(base: PreTrainedModel, name: str) -> Iterator[None]:
    """Runs ``base`` with the attention that transformers knows by ``name``."""
    before = base.config._attn_implementation
    base.set_attn_implementation(name)
    try:
        yield
    finally:
        base.set_attn_implementation(before)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


class PackedAttention(torch.autograd.Function):
    """(1, H, N, D) queries, (1, K, N, D) keys and values to (1, H, N, D)."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        segments: Segments,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,  # (H,)
        window: int | None = None,
    ) -> Tensor:
        ctx.kernel, ctx.segments, ctx.scale = kernel_for(query, softcap, window), segments, scale
        output, logsumexp = ctx.kernel.forward(query, key, value, segments, scale)
        if sinks is not None:
            sink = sinks.float().unsqueeze(1)
            output, logsumexp = join(output, logsumexp, output.new_zeros(()), sink)
        ctx.save_for_backward(query, key, value, output, logsumexp, sinks)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, sinks = ctx.saved_tensors
        saved, of_sinks = Saved(*tensors), None
        grads = ctx.kernel.backward(grad, saved, ctx.segments, ctx.scale)
        if sinks is not None and ctx.needs_input_grad[6]:
            share = (sinks.float().unsqueeze(1) - saved.logsumexp).exp()
            of_sinks = -(share * (grad.float() * saved.output.float()).sum(-1)).sum((0, 2))
            of_sinks = of_sinks.to(sinks.dtype)
        return (*grads, None, None, None, of_sinks, None)


def padded_heads(*tensors: Tensor) -> list[Tensor]:
    """Heads padded with zeros to one size, on CUDA to a multiple of 8: the same attention.

    DeepSeek's values are smaller than its keys.
    """
    size = max(x.shape[-1] for x in tensors)
    if tensors[0].device.type == "cuda":
        size = -(-size // 8) * 8
    return [F.pad(x, (0, size - x.shape[-1])) if x.shape[-1] < size else x for x in tensors]


def _flash_takes(query: Tensor, segments: Segments, how: Scores) -> bool:
    """Whether FlashAttention knows the window of ``how``: within rows, not across a prefix."""
    return how.softcap is None and not segments.table[1:] and VarlenKernel.supports(query)


def kernel_for(
    query: Tensor, softcap: float | None = None, window: int | None = None
) -> SegmentKernel | MetaKernel | VarlenKernel:
    """The fastest kernel for the device and dtype of ``query``; with a softcap the plain one."""
    if query.is_meta:
        return META
    if softcap is not None:
        return plain(softcap)
    if VarlenKernel.supports(query):
        return VarlenKernel(window)
    return CPU if query.device.type == "cpu" and query.dtype in CPU_DTYPES else PLAIN


def _sequence_by_sequence(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, how: Scores
) -> Tensor:
    """With dropout, a local window or chunks, which log-sum-exps cannot join: row after row, in
    blocks of queries that read the keys within their reach.
    """
    key, value = per_query_head(key, query), per_query_head(value, query)
    reach = how.window or how.chunk
    size = max(_BLOCK, reach) if reach else max(1, segments.longest)
    parts = []
    for (start, stop), (own, end) in segments.sequences:
        rows = [torch.cat([x[:, :, start:stop], x[:, :, own:end]], dim=2) for x in (key, value)]
        shared = stop - start
        for first in range(shared, shared + end - own, size):
            last = min(first + size, shared + end - own)
            mask = _causal_mask(first, last, how, query.device)
            queries = query[:, :, own + first - shared : own + last - shared]
            k, v = (x[:, :, last - mask.shape[1] : last] for x in rows)
            parts.append(_masked(queries, k, v, mask, how))
    return torch.cat(parts, dim=2)


def _causal_mask(first: int, last: int, how: Scores, device: torch.device) -> Tensor:
    """(Q, K) bool: which of the K keys before position ``last`` queries from ``first`` on read."""
    is_local = how.window or how.chunk
    queries = torch.arange(first, last, device=device).unsqueeze(1)
    keys = torch.arange(max(0, how.first_key(first)) if is_local else 0, last, device=device)
    seen = keys <= queries
    return seen & (keys >= how.first_key(queries)) if is_local else seen


def _masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, how: Scores) -> Tensor:
    """Attention (B, H, Q, D) to the keys that ``mask`` (..., Q, K) bool has, by autograd."""
    if how.softcap is None and how.sinks is None:
        return F.scaled_dot_product_attention(q, k, v, mask, how.dropout, scale=how.scale)
    scores = capped(q.float() @ k.float().transpose(-1, -2) * how.scale, how.softcap)
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if how.sinks is not None:
        sinks = how.sinks.float().view(-1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    probs = F.dropout(scores.softmax(-1)[..., : k.shape[2]], how.dropout)
    return probs.to(v.dtype) @ v
