"""Runs an operation of a decode step by its Triton kernel on CUDA, or else by torch.

NOTE: kernels are off unless DSCHAT_CUDA_KERNELS is 1: none was ever run or timed on a device. Their
results are checked under Triton's interpreter, their machine code for sm_90 is inspected.
"""

import os
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from dschat.inference.kernels.cuda.workspace import Workspace
from dschat.inference.model.attention import Attention
from dschat.inference.model.head_layout import HeadLayout
from dschat.inference.model.rotary import Rotary
from dschat.inference.protocol import SamplingParams
from dschat.inference.sampling import sample, uniforms


def enabled(device: torch.device) -> bool:
    """Whether operations on ``device`` run by Triton kernels."""
    return (
        device.type == "cuda"
        and os.environ.get("DSCHAT_CUDA_KERNELS") == "1"
        and find_spec("triton") is not None
    )


def add_norm(
    h: Tensor, added: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> Tensor:
    """``h`` (R, E) += ``added``, in place; returns its LayerNorm, or without ``bias`` its RMSNorm.

    ``weight`` and ``bias`` (E,); all contiguous.
    """
    if enabled(h.device):
        from dschat.inference.kernels.cuda import add_norm as kernel

        return kernel.add_norm(h, added, weight, bias, eps)
    total = h if added is None else h.add_(added)
    if bias is None:
        return F.rms_norm(total, weight.shape, weight, eps)
    return F.layer_norm(total, weight.shape, weight, bias, eps)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    space: Workspace,
    activation: str = "",
    gated: bool = False,
) -> Tensor:
    """act(x W^T + b), or if ``gated`` act(x G^T + b) * (x U^T + c), (R, N).

    ``x`` (R, E), ``weight`` (N, E), or (2 N, E) with the gate G before U, ``bias`` (N,) or (2 N,).
    ``activation``: a name of transformers', "" for none. The kernel takes up to 64 rows.
    """
    if enabled(x.device):
        from dschat.inference.kernels.cuda import skinny_linear as kernel

        if len(x) <= kernel.MAX_ROWS and activation in kernel.ACTIVATIONS:
            return kernel.skinny_linear(
                x, weight, bias, activation, gated, space.partials, space.counters
            )
    y = F.linear(x, weight, bias)
    activated = ACT2FN[activation] if activation else torch.nn.Identity()
    if not gated:
        return activated(y)
    gate, up = y.chunk(2, dim=-1)
    return activated(gate) * up


def decode_attention(
    layer: int,
    heads_BHD: Tensor,
    step: Attention,
    norms: tuple[Tensor, Tensor, float] | None,
    rotary: Rotary | None,
    space: Workspace,
) -> Tensor:
    """Attention of a step in which all sequences decode: heads (B, H + 2 K, D) -> (B, H * D).

    Normalises the query and key heads with ``norms`` (RMS weights (D,) of both, and epsilon),
    rotates them, and writes the new keys and values to ``step``'s cache.
    """
    decodes, rows = step.decodes, step.cache.layers[layer][0]
    assert decodes is not None
    assert not step.chunks
    q_norm, k_norm, eps = norms or (None, None, 0.0)
    if enabled(heads_BHD.device):
        from dschat.inference.kernels.cuda import paged_decode as kernel

        return kernel.paged_decode(
            *(heads_BHD, rows, decodes.lengths, step.slot_mapping, decodes.block_table),
            *(step.cache.page_size, step.slopes, step.spec.window(layer)),
            *(step.spec.attention_scale(layer), q_norm, k_norm, eps),
            *((None, None) if rotary is None else (rotary.cos, rotary.sin)),
            *(space.partials, space.counters),
        )
    q_and_k = heads_BHD[:, : -(rows.shape[1] // 2)]
    if q_norm is not None and k_norm is not None:
        q, k = q_and_k.split([q_and_k.shape[1] - rows.shape[1] // 2, rows.shape[1] // 2], dim=1)
        for x, weight in ((q, q_norm), (k, k_norm)):
            x.copy_(F.rms_norm(x, weight.shape, weight, eps))
    if rotary is not None:
        rotary.rotate_(q_and_k, rotary.rows(decodes.lengths - 1))
    num_kv_heads = rows.shape[1] // 2
    layout = HeadLayout.of(heads_BHD.shape[1] - 2 * num_kv_heads, num_kv_heads)
    return step(layer, heads_BHD, layout)


def draw(
    logits: Tensor,
    params: SamplingParams,
    temperature: Tensor,
    seed: Tensor,
    counters: Tensor,
    short: Tensor | None,
    stops: Tensor,
    num_tokens: int,
) -> tuple[Tensor, Tensor]:
    """Draw ids (R,) int64 and their log-probs (R,) fp32 from ``logits`` (R, V), as `sample` does.

    Args:
        temperature, seed: (1,) float64 and int64, of ``params`` (temperature 1 if it is greedy).
        counters: (3, R) int64: prompt index, sample index and position of each row.
        short: (R,) bool, rows that may not draw ``stops`` (S,) int64.
        num_tokens: ids from this one on are never drawn.
    """
    truncates = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
    greedy = params.temperature == 0
    if enabled(logits.device) and (greedy or not truncates):
        from dschat.inference.kernels.cuda import draw as kernel

        return kernel.draw(logits, temperature, greedy, seed, counters, short, stops, num_tokens)
    uniform = None if greedy else uniforms(params.seed, *counters)
    forbidden = None if short is None or not len(stops) else (short, stops)
    return sample(logits, params, uniform, forbidden, num_tokens)
