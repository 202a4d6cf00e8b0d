"""Samples tokens from logits: counter-based random numbers, truncation, inverse CDF, log-probs.

Pure functions of tensors that both generators share. A row's token and log-prob do not depend on
the other rows of its batch. One uniform is drawn per sequence and position, not one per vocabulary
entry, and passes over the vocabulary are few: on a CPU each pass over (R, V) takes 0.1 ms.

NOTE: on CUDA nothing here may synchronize with the device (no ``item``, no boolean indexing). The
only branch on data, in `_top_p`, is on CPU.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from dschat.inference.protocol import SamplingParams

# The finalizer of SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number
# generators"), on int64 tensors whose products wrap.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)

_BLOCK = 128  # tokens per block of the two-level CDF; 64 to 512 take about the same time
_ONE_LEVEL = 4096  # below this vocabulary size, one cumulative sum is faster than two levels

# Top-p on CPU tries these numbers of likeliest tokens before it sorts the whole vocabulary. At
# 16 x 50,272 a topk of 128 takes 1.7 ms, of 4,096 5.5 ms, a sort 30 ms.
_NUCLEUS_SIZES = (128, 4096)


class RowNumbers(NamedTuple):
    """The numbers of each row's `SamplingParams`, which a captured step reads from memory.

    A row keeps all tokens by an infinite ``top_p``, a ``min_p`` of 0, or a ``top_k`` of at least
    the vocabulary size.
    """

    temperature: Tensor  # (R, 1) float64, 1 in greedy rows
    top_p: Tensor  # (R, 1) float64
    min_p: Tensor  # (R, 1) float64
    top_k: Tensor  # (R, 1) int64
    is_greedy: Tensor | None  # (R, 1) bool; None: as `SamplingParams.temperature` says


def _logical_shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _logical_shift(x, 30)) * _MIX_1
    x = (x ^ _logical_shift(x, 27)) * _MIX_2
    return x ^ _logical_shift(x, 31)


def uniforms(
    seed: int | Tensor, prompt_index: Tensor, sample_index: Tensor, position: Tensor
) -> Tensor:
    """One number in [0, 1) per element: a hash of (seed, prompt, sample, position) only.

    The three tensors are int64 with shapes that broadcast, such as (S, 1), (S, 1) and (1, A); so is
    ``seed`` unless it is a number. Returns float64 of the broadcast shape.
    """
    state = seed if isinstance(seed, Tensor) else torch.full_like(prompt_index, seed)
    for counter in (prompt_index, sample_index, position):
        state = _mix(state + _GAMMA) + counter * _GAMMA
    return _logical_shift(_mix(state + _GAMMA), 11).double() * 2.0**-53


def _coarse_cdf(weights: Tensor) -> Tensor:
    """Cumulative sums in float64 of contiguous ``weights`` (R, V) fp32; the last one is the total.

    Small vocabularies: after every token, (R, V). Large ones: before the first and after every
    block of tokens, (R, blocks + 1).
    """
    num_rows, num_tokens = weights.shape
    if num_tokens <= _ONE_LEVEL:
        return weights.cumsum(-1, dtype=torch.float64)
    blocks, rest = divmod(num_tokens, _BLOCK)
    sums = weights.new_zeros(num_rows, 1 + blocks + (rest > 0))
    whole = weights[:, : blocks * _BLOCK].unflatten(-1, (blocks, _BLOCK))
    torch.sum(whole, -1, out=sums[:, 1 : 1 + blocks])
    if rest:  # NOTE: summed separately, because padding would copy everything
        torch.sum(weights[:, -rest:], -1, out=sums[:, -1])
    return sums.cumsum(-1, dtype=torch.float64)


def _draw(weights: Tensor, cdf: Tensor, uniform: Tensor) -> Tensor:
    """`inverse_cdf` (R, 1) of contiguous ``weights`` with their `_coarse_cdf`.

    ``right=True`` finds the first sum above the target, so never a token of probability zero as
    long as the target is below the total. It is: ``uniform`` < 1, also after rounding to float64.
    """
    last = weights.shape[-1] - 1
    target = uniform.to(cdf).unsqueeze(-1) * cdf[:, -1:]
    position = torch.searchsorted(cdf, target, right=True)
    if last < _ONE_LEVEL:
        return position.clamp_(max=last)  # a row of NaN must not exceed the vocabulary
    block = position - 1
    # Columns beyond the end repeat the last token: sums before it are unchanged, and a target that
    # falls there gets the last token.
    columns = block * _BLOCK + torch.arange(_BLOCK, device=weights.device)
    inside = weights.gather(-1, columns.clamp_(max=last)).cumsum(-1, dtype=torch.float64)
    # The block's sum may round differently: a target past its tokens gets the last with mass.
    target = torch.minimum(target - cdf.gather(-1, block), inside[:, -1:] * (1 - 2.0**-53))
    return (block * _BLOCK + torch.searchsorted(inside, target, right=True)).clamp_(max=last)


@torch.no_grad()
def inverse_cdf(probs: Tensor, uniform: Tensor) -> Tensor:
    """The token at which each row's cumulative probability exceeds ``uniform`` x the row's total.

    ``probs`` (R, V) fp32, not necessarily normalized; ``uniform`` (R,) float64 in [0, 1). Returns
    ids (R,) int64, never one of probability zero. Sums are in float64: over blocks of tokens, then
    inside the block that contains the target.
    """
    probs = probs.contiguous()
    return _draw(probs, _coarse_cdf(probs), uniform).squeeze(-1)


def _cut(
    ordered: Tensor, share: float | Tensor, total: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Zero the tokens after the one at which the sum of ``ordered`` (R, K), descending, reaches
    ``share`` of ``total`` (R, 1) float64 (default: of its own sum). Also returns whether each row
    reaches it, (R,) bool.
    """
    size = ordered.shape[-1]
    cdf = ordered.cumsum(-1, dtype=torch.float64)
    last = torch.searchsorted(cdf, share * (cdf[:, -1:] if total is None else total))
    beyond = torch.arange(size, device=ordered.device) > last
    return ordered.masked_fill(beyond, 0.0), last.squeeze(-1) < size


def _top_p(probs: Tensor, top_p: float | Tensor) -> Tensor:
    """``probs`` (R, V) with zeros outside each row's nucleus.

    On CPU, rows with a small nucleus (nearly all of a trained model's) skip the full sort.
    """
    num_rows, num_tokens = probs.shape
    nucleus = torch.zeros_like(probs, memory_format=torch.contiguous_format)
    total = _coarse_cdf(probs.contiguous())[:, -1:]
    starts = torch.arange(num_rows, device=probs.device).unsqueeze(-1) * num_tokens
    branches = not (probs.is_cuda or isinstance(top_p, Tensor))  # a captured step must not
    sizes = tuple(k for k in _NUCLEUS_SIZES if k < num_tokens) if branches else ()
    for size in (*sizes, num_tokens):
        if size < num_tokens:
            ordered, ids = probs.topk(size, dim=-1)
        else:
            ordered, ids = probs.sort(-1, descending=True)
        ordered, enough = _cut(ordered, top_p, total)
        if size < num_tokens:  # NOTE: the next topk may select other tokens of equal probability
            ordered.masked_fill_(~enough.unsqueeze(-1), 0.0)
        nucleus.view(-1).scatter_(0, (ids + starts).view(-1), ordered.view(-1))
        if size == num_tokens or enough.all():
            break
        probs, total, starts = probs[~enough], total[~enough], starts[~enough]
    return nucleus


def truncate(probs: Tensor, params: SamplingParams, numbers: RowNumbers | None = None) -> Tensor:
    """Zero what top-k, top-p and min-p exclude; ``probs`` (R, V) fp32, not necessarily normalized.

    Order: top-k, then top-p on the renormalized rest, then min-p relative to the likeliest token.
    Top-p keeps the smallest set of likeliest tokens whose mass reaches p. The likeliest token
    always stays. Ties at the threshold are broken deterministically, so the number of tokens kept
    is as defined. Returns a new tensor (R, V).
    """
    values = numbers or params
    num_tokens = probs.shape[-1]
    if params.top_k > 0 and (params.top_k < num_tokens or numbers is not None):
        ordered, ids = probs.topk(min(params.top_k, num_tokens), dim=-1)
        if numbers is not None:
            place = torch.arange(ordered.shape[-1], device=probs.device)
            ordered = ordered.masked_fill(place >= numbers.top_k, 0.0)
        if params.top_p < 1:
            ordered, _ = _cut(ordered, values.top_p)
        probs = torch.zeros_like(probs).scatter_(-1, ids, ordered)
    elif params.top_p < 1:
        probs = _top_p(probs, values.top_p)
    if params.min_p > 0:
        min_p = params.min_p if numbers is None else numbers.min_p.to(probs.dtype)
        least = min_p * probs.amax(-1, keepdim=True)
        probs = torch.where(probs < least, 0.0, probs)
    return probs


def _without(logits: Tensor, ids: Tensor, is_absent: Tensor) -> Tensor:
    """A copy of ``logits`` (R, V) with minus infinity at ``ids`` (R, K) but where ``is_absent``."""
    bounds = torch.zeros_like(ids, dtype=logits.dtype).masked_fill_(is_absent, torch.inf)
    bounds = bounds.masked_fill_(~is_absent, -torch.inf)
    return logits.scatter_reduce(-1, ids, bounds, "amin")


@torch.no_grad()
def sample(
    logits: Tensor,
    params: SamplingParams,
    uniform: Tensor | None,
    forbidden: tuple[Tensor, Tensor] | None = None,
    num_tokens: int | None = None,
    numbers: RowNumbers | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw one token per row of ``logits`` (R, V), of any floating dtype, without changing them.

    Args:
        uniform: (R,) float64; not needed when greedy.
        forbidden: rows (R,) bool and ids int64 below V, (K,) or each row's (R, K), all different
            but for -1, on the device of ``logits``. These ids have probability zero in these rows;
            -1 is none. Every row must keep a token.
        num_tokens: ids from this one on are never drawn (a head may have more rows than its
            tokenizer has tokens).
        numbers: used in place of the numbers in ``params``, which then only says which apply, and
            has a ``top_k`` that is at least the largest (0: none applies).

    Returns:
        ids (R,) int64 and log-probs (R,) fp32: the log-softmax of the raw logits / T, before
        truncation and forbidden ids (T = 1 when greedy).
    """
    tempered = params.logprob_temperature != 1
    temperature = numbers.temperature if numbers else params.logprob_temperature
    logits = logits.float()
    allowed = logits
    if forbidden is not None:
        rows, ids = forbidden
        banned = ids.expand(len(logits), -1).clamp(min=0)
        is_absent = ~rows.unsqueeze(-1) | (ids < 0)
        allowed = _without(logits, banned, is_absent)
    padding = logits[:, num_tokens:] if num_tokens else logits[:, :0]
    allowed = allowed[:, : allowed.shape[1] - padding.shape[1]]
    best = allowed.amax(-1, keepdim=True)
    weights = torch.sub(allowed, best).contiguous()
    if tempered:
        weights.div_(numbers.temperature.to(weights) if numbers else temperature)
    cdf = _coarse_cdf(weights.exp_())
    if params.temperature == 0:
        ids = allowed.argmax(-1, keepdim=True)
    else:
        assert uniform is not None, "drawing needs random numbers"
        if params.truncates:
            ids = inverse_cdf(truncate(weights, params, numbers), uniform).unsqueeze(-1)
        else:
            ids = _draw(weights, cdf, uniform)
        if numbers is not None and numbers.is_greedy is not None:
            ids = torch.where(numbers.is_greedy, allowed.argmax(-1, keepdim=True), ids)

    def scores(ids: Tensor) -> Tensor:  # (logit - best) / T, float64
        return (logits.gather(-1, ids).double() - best) / temperature

    log_total = cdf[:, -1:].log()
    if forbidden is not None:
        mass = scores(banned).masked_fill(is_absent, -torch.inf).logsumexp(-1, keepdim=True)
        log_total = torch.logaddexp(log_total, mass)
    if padding.shape[1]:
        mass = ((padding.double() - best) / temperature).logsumexp(-1, keepdim=True)
        log_total = torch.logaddexp(log_total, mass)
    return ids.squeeze(-1), (scores(ids) - log_total).float().squeeze(-1)
