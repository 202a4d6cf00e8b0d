"""Drawing tokens: counter-based random numbers, truncation, inverse-CDF sampling, log-probs.

Logits in, token ids and log-probs out; pure functions of tensors that both generators share. One
uniform is drawn per sequence and position, not one per vocabulary entry. Nothing here knows models
or batches.
"""

import torch
from torch import Tensor

from dschat.rollout import SamplingParams

# The finaliser of SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number
# generators"), on int64 tensors whose products wrap.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def _logical_shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _logical_shift(x, 30)) * _MIX_1
    x = (x ^ _logical_shift(x, 27)) * _MIX_2
    return x ^ _logical_shift(x, 31)


def uniforms(seed: int, prompt_index: Tensor, sample_index: Tensor, position: Tensor) -> Tensor:
    """One number in [0, 1) per row, a hash of (seed, prompt, sample, position) and of nothing else.

    The three tensors are int64 of one shape (R,); returns float64 (R,).
    """
    state = torch.full_like(prompt_index, seed)
    for counter in (prompt_index, sample_index, position):
        state = _mix(state + _GAMMA) + counter * _GAMMA
    return _logical_shift(_mix(state + _GAMMA), 11).double() * 2.0**-53


def truncate(probs: Tensor, params: SamplingParams) -> Tensor:
    """Zero what top-k, top-p and min-p exclude. ``probs`` (R, V) sums to 1 per row; the result need
    not.

    Top-k comes first, then top-p on the renormalised rest, then min-p, each relative to the
    likeliest token that is left. The likeliest token always stays.
    """
    num_tokens = probs.shape[-1]
    if 0 < params.top_k < num_tokens:
        kept, ids = probs.topk(params.top_k, dim=-1)
        probs = torch.zeros_like(probs).scatter_(-1, ids, kept)
    if params.top_p < 1:
        ordered, ids = probs.sort(dim=-1, descending=True)
        mass_before = ordered.cumsum(-1) - ordered
        ordered = ordered.masked_fill(
            mass_before >= params.top_p * ordered.sum(-1, keepdim=True), 0.0
        )
        probs = torch.zeros_like(probs).scatter_(-1, ids, ordered)
    if params.min_p > 0:
        probs = probs.masked_fill(probs < params.min_p * probs.amax(-1, keepdim=True), 0.0)
    return probs


def inverse_cdf(probs: Tensor, uniform: Tensor) -> Tensor:
    """The token at which each row's cumulative mass passes ``uniform`` x its total.

    ``probs`` (R, V) fp32, not necessarily normalised; ``uniform`` (R,) in [0, 1). Returns ids (R,)
    int64, never one of probability zero.
    """
    cdf = probs.cumsum(-1)
    total = cdf[:, -1:]
    target = (uniform.to(total.device).unsqueeze(-1) * total.double()).to(cdf.dtype)
    # Rounding may carry the target up to the total itself; the last token with mass then holds it.
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cdf, target, right=True).squeeze(-1)


def sample(logits: Tensor, params: SamplingParams, uniform: Tensor | None) -> tuple[Tensor, Tensor]:
    """Draw one token per row of ``logits`` (R, V).

    ``uniform`` (R,) is not needed when greedy. Returns ids (R,) int64 and log-probs (R,) fp32: the
    log-softmax of the raw logits / T, before any truncation (T = 1 when greedy).
    """
    logprobs = torch.log_softmax(logits.float() / params.logprob_temperature, dim=-1)
    if params.temperature == 0:
        ids = logits.argmax(-1)
    else:
        assert uniform is not None
        ids = inverse_cdf(truncate(logprobs.exp(), params), uniform)
    return ids, logprobs.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
