"""Attention over packed rows, registered with transformers under the name ``dschat``.

Every prefix and every answer attends causally to itself; an answer also attends to its whole
prefix. The two parts are joined by their log-sum-exps. Backward runs the kernel's own backward on
each part with the joined output and log-sum-exp, which gives the exact gradient of the whole: it
recomputes probabilities as exp(scores - log-sum-exp), as ring attention does (arXiv 2310.01889).
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
    Kernel,
    Saved,
    per_query_head,
)
from dschat.models.packing.segments import Segments
from dschat.models.packing.varlen import VarlenKernel

NAME = "dschat"

# Arguments of transformers' attention functions that change the scores, or select keys.
_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "head_mask", "indices", "block_indices")


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
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface. Without ``segments`` it is transformers' ``sdpa``.

    Args:
        query: (1, H, N, D); key, value: (1, K, N, D), where K divides H.

    Returns:
        (1, N, H, D), and None for the weights.
    """
    if segments is None:
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **others
        )
        return output, None
    for name in _UNSUPPORTED:
        if others.get(name) is not None:
            raise UnsupportedAttentionError(f"{type(module).__name__} uses {name}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    size = value.shape[-1]
    window = sliding_window if sliding_window and sliding_window < segments.longest else None
    if dropout or window:
        output = _sequence_by_sequence(query, key, value, segments, scale, dropout, window)
    else:
        output = PackedAttention.apply(*_same_sizes(query, key, value), segments, scale)
    # NOTE: contiguous, as transformers' own: some families take a view of it.
    return output[..., :size].transpose(1, 2).contiguous(), None


@contextmanager
def own_attention(base: PreTrainedModel) -> Iterator[None]:
    """Runs ``base`` with the attention that packed attention stands in for."""
    name = base.config._attn_implementation
    if name != NAME:
        yield
        return
    base.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        base.set_attn_implementation(name)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


class PackedAttention(torch.autograd.Function):
    """(1, H, N, D) queries, (1, K, N, D) keys and values to (1, H, N, D)."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float
    ) -> Tensor:
        output, logsumexp = _kernel(query).forward(query, key, value, segments, scale)
        ctx.save_for_backward(query, key, value, output, logsumexp)
        ctx.segments, ctx.scale = segments, scale
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = Saved(*ctx.saved_tensors)
        grads = _kernel(saved.q).backward(grad, saved, ctx.segments, ctx.scale)
        return (*grads, None, None)


def _same_sizes(*tensors: Tensor) -> list[Tensor]:
    """Heads padded with zeros to one size, on CUDA to a multiple of 8: the same attention.

    DeepSeek's values are smaller than its keys.
    """
    size = max(x.shape[-1] for x in tensors)
    if tensors[0].device.type == "cuda":
        size = -(-size // 8) * 8
    return [F.pad(x, (0, size - x.shape[-1])) if x.shape[-1] < size else x for x in tensors]


def _kernel(query: Tensor) -> Kernel:
    """The fastest kernel for the device and dtype of ``query``."""
    if query.is_meta:
        return META
    if query.device.type == "cpu" and query.dtype in CPU_DTYPES:
        return CPU
    if query.device.type == "cuda" and VarlenKernel.supports(query):
        return VarlenKernel()
    return PLAIN


def _sequence_by_sequence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    scale: float,
    dropout: float,
    window: int | None,
) -> Tensor:
    """With dropout or a local window, which log-sum-exps cannot join: row after row."""
    key, value = per_query_head(key, query), per_query_head(value, query)
    parts, start = [], 0
    for prefix, answers in segments.groups:
        end = start
        for shared, length in ((0, prefix), *((prefix, length) for length in answers)):
            of_prefix, own = slice(start, start + shared), slice(end, end + length)
            keys, values = (
                torch.cat([x[:, :, of_prefix], x[:, :, own]], dim=2) for x in (key, value)
            )
            positions = torch.arange(shared + length, device=query.device)
            distance = positions[shared:, None] - positions
            mask = distance >= 0
            if window is not None:
                mask &= distance < window
            queries = query[:, :, own]
            parts.append(
                F.scaled_dot_product_attention(queries, keys, values, mask, dropout, scale=scale)
            )
            end += length
        start = end
    return torch.cat(parts, dim=2)
