"""Losses of actor and critic: PPO, GSPO, CISPO, clipped value loss, importance weights.

Each loss is a sum over actions. `aggregation_weights` weighs the actions, `aggregation_count` is
what the sum over the whole optimizer step is divided by. Conventions: see `dschat.losses`.
"""

from typing import Literal

import torch
from torch import Tensor

CLIPRANGE = float | tuple[float, float]
Aggregation = Literal["token", "sequence", "constant"]
Correction = Literal["off", "tis", "icepop", "seq_tis", "seq_mask", "geo_mask"]


def aggregation_weights(answer_mask: Tensor, how: Aggregation, max_len: int) -> Tensor:
    """Weight of every action's loss: (B, A) fp32, 0 outside the mask.

    With `aggregation_count`: ``token`` is the mean over the tokens of the step (DAPO, arXiv
    2503.14476, eq. 12), ``sequence`` the mean over sequences of their means (GRPO, arXiv
    2402.03300, eq. 3), ``constant`` the mean over sequences of their sums / ``max_len`` (Dr. GRPO,
    arXiv 2503.20783).
    """
    weights = answer_mask.float()
    if how == "sequence":
        return weights / weights.sum(dim=1, keepdim=True).clamp(min=1)
    return weights / max_len if how == "constant" else weights


def aggregation_count(answer_mask: Tensor, how: Aggregation) -> Tensor:
    """Denominator of the loss sum: tokens, or sequences with an action. 0-d int64, to be summed."""
    return answer_mask.sum() if how == "token" else answer_mask.any(dim=1).sum()


@torch.no_grad()
def rollout_weights(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    answer_mask: Tensor,
    how: Correction,
    low: float,
    high: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Importance weights that correct for the generator sampling from other probabilities.

    The weight of an action is training's probability / the generator's, both before the update.
    ``tis`` truncates it at ``high`` (Yao et al. 2025, "Your efficient RL framework secretly brings
    you off-policy RL training"; Ionides 2008); ``icepop`` drops actions outside [low, high] (arXiv
    2510.18855). By answer (Liu et al. 2025, "When speed kills stability"): ``seq_tis`` truncates
    the product of an answer's ratios, ``seq_mask`` drops answers whose product is outside the
    range; both give it to all actions. ``geo_mask`` drops answers by the geometric mean, and weighs
    the others' actions each by its own ratio.

    Args:
        logprobs, rollout_logprobs: (B, A), training's and the generator's.
        answer_mask: (B, A) bool.

    Returns:
        weights: (B, A) fp32, 0 outside the mask; 1 inside where ``how`` is "off".
        metrics: sums over actions of ``is_weight`` and ``is_cut`` (truncated or dropped), and
            ``is_dropped``, answers of which no action is left.
    """
    ones = answer_mask.float()
    if how == "off":
        zero = ones.new_zeros(())
        return ones, {"is_weight": ones.sum(), "is_cut": zero, "is_dropped": zero}
    log_ratio = torch.where(answer_mask, logprobs.float() - rollout_logprobs.float(), 0.0)
    compared = log_ratio
    if how in ("seq_tis", "seq_mask"):
        compared = log_ratio.sum(dim=1, keepdim=True)
    elif how == "geo_mask":
        compared = _mean_over_actions(log_ratio, answer_mask)
    ratio = compared.exp()
    if how in ("tis", "seq_tis"):
        weights, cut = ratio.clamp(max=high), ratio > high
    else:
        cut = (ratio < low) | (ratio > high)
        weights = torch.where(cut, 0.0, log_ratio.exp() if how == "geo_mask" else ratio)
    weights = torch.where(answer_mask, weights, 0.0)
    is_dropped = answer_mask.any(dim=1) & (weights == 0).all(dim=1)
    metrics = {"is_cut": cut & answer_mask, "is_dropped": is_dropped}
    return weights, {"is_weight": weights.sum()} | {n: m.float().sum() for n, m in metrics.items()}


@torch.no_grad()
def off_policy_mask(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    answer_mask: Tensor,
    threshold: float,
) -> Tensor:
    """Actions to learn from: (B, A) bool. Leaves out those of negative advantage in answers that
    the policy has moved away from (DeepSeek-V3.2, arXiv 2512.02556, eq. 9).

    Args:
        logprobs, rollout_logprobs: (B, A), of the policy being trained, and as drawn.
        threshold: largest mean of ``rollout_logprobs - logprobs`` over an answer's actions, nats.
    """
    moved = torch.where(answer_mask, rollout_logprobs.float() - logprobs.float(), 0.0)
    is_near = _mean_over_actions(moved, answer_mask) <= threshold
    return answer_mask & ((advantages >= 0) | is_near)


def _mean_over_actions(x: Tensor, answer_mask: Tensor) -> Tensor:
    """(B, 1) of ``x`` (B, A), which is 0 outside the mask."""
    return x.sum(dim=1, keepdim=True) / answer_mask.sum(dim=1, keepdim=True).clamp(min=1)


def ppo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    answer_mask: Tensor,
    cliprange: CLIPRANGE,
    *,
    weights: Tensor | None = None,
    dual_clip: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate (Schulman et al. 2017, arXiv 1707.06347, eq. 7), negated and summed.

    Args:
        logprobs: (B, A) of the policy being trained; the only input that gets a gradient.
        old_logprobs: (B, A) of the policy at the start of the update.
        advantages: (B, A).
        answer_mask: (B, A) bool.
        cliprange: epsilon; the ratio is clipped to [1 - epsilon, 1 + epsilon]. A pair is
            (below, above) (clip-higher: DAPO, arXiv 2503.14476, eq. 10).
        weights: (B, A), a factor on each action's loss; None: 1.
        dual_clip: c > 1; where the advantage is negative, the loss is at most -c * advantage (Ye
            et al. 2020, arXiv 1912.09729, eq. 5).

    Returns:
        loss_sum: 0-d fp32; it or its gradient is non-finite if a ratio leaves fp32's range (e^88):
            a step to skip.
        metrics: unweighted sums over actions of ``clipped`` (1 where a clipped term is the loss, so
            that the action has no gradient), ``clipped_low`` (the actions of a ratio below 1),
            ``approxkl`` (half the squared log-ratio), ``ratio``, ``ratio_abs_dev`` (|ratio - 1|);
            and ``tokens``, the number of actions.
    """
    log_ratio, advantages = _inputs(logprobs, old_logprobs, advantages, answer_mask)
    losses, is_clipped = _surrogate(log_ratio.exp(), advantages, cliprange)
    if dual_clip is not None:
        bound = -dual_clip * advantages
        is_bounded = (advantages < 0) & (losses > bound)
        losses = torch.where(is_bounded, bound, losses)
        is_clipped = is_clipped | is_bounded
    metrics = _metrics(log_ratio, log_ratio, is_clipped, answer_mask)
    return _summed(losses, weights, answer_mask), metrics


def gspo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    answer_mask: Tensor,
    cliprange: CLIPRANGE,
    *,
    weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's surrogate with one ratio per sequence: the geometric mean of its tokens' ratios.

    GSPO (Zheng et al. 2025, arXiv 2507.18071) in its token-level form (eq. 13-14): with weights
    1/|o_i|, value and gradient are eq. 5's. Arguments and metrics as in `ppo_loss`.
    """
    log_ratio, advantages = _inputs(logprobs, old_logprobs, advantages, answer_mask)
    of_sequence = _mean_over_actions(log_ratio.detach(), answer_mask)
    # NOTE: keep the brackets. Adding a large log-ratio first would round off the low digits of
    # the sequence's.
    ratio = (of_sequence + (log_ratio - log_ratio.detach())).exp()
    losses, is_clipped = _surrogate(ratio, advantages, cliprange)
    metrics = _metrics(log_ratio, of_sequence, is_clipped, answer_mask)
    return _summed(losses, weights, answer_mask), metrics


def cispo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    answer_mask: Tensor,
    cliprange: CLIPRANGE,
    *,
    weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """REINFORCE weighted by the clipped ratio, so that every action keeps a gradient.

    CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4-5): ``-sg(clip(ratio)) * A * log-prob``. Arguments
    and metrics as in `ppo_loss`; ``clipped`` counts ratios outside the range.
    """
    log_ratio, advantages = _inputs(logprobs, old_logprobs, advantages, answer_mask)
    low, high = _sides(cliprange)
    ratio = log_ratio.detach().exp()
    coefficient = ratio.clamp(1 - low, 1 + high)
    losses = -coefficient * advantages * torch.where(answer_mask, logprobs.float(), 0.0)
    return (
        _summed(losses, weights, answer_mask),
        _metrics(log_ratio, log_ratio, ratio != coefficient, answer_mask),
    )


def sapo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    answer_mask: Tensor,
    temperatures: CLIPRANGE,
    *,
    weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's surrogate with a gate that closes softly in place of the clip.

    SAPO (arXiv 2511.20347, eq. 5-6): ``-4 / tau * sigmoid(tau * (ratio - 1)) * A``, whose gradient
    is PPO's at ratio 1 and fades on both sides. ``temperatures``: tau where the advantage is
    negative, and elsewhere. Other arguments and metrics as in `ppo_loss`; none is ``clipped``.
    """
    log_ratio, advantages = _inputs(logprobs, old_logprobs, advantages, answer_mask)
    negative, positive = _sides(temperatures)
    tau = torch.where(advantages > 0, positive, negative)
    losses = -4 / tau * torch.sigmoid(tau * (log_ratio.exp() - 1)) * advantages
    metrics = _metrics(log_ratio, log_ratio, torch.zeros_like(answer_mask), answer_mask)
    return _summed(losses, weights, answer_mask), metrics


# Clip-Cov's bounds, and the share of all actions that it leaves out: the authors' and verl's.
_COVARIANCES, CLIP_COV_SHARE = (1.0, 5.0), 2e-4


@torch.no_grad()
def is_covariant(logprobs: Tensor, advantages: Tensor, answer_mask: Tensor, sums: Tensor) -> Tensor:
    """Actions of which Clip-Cov leaves out some: (B, A) bool, where log-prob and advantage are both
    far from their means on the same side, so that learning from them takes entropy.

    Cui et al. 2025, arXiv 2505.22617, eq. 10-11: the product of both differences is in (1, 5).
    ``sums``: number of actions, and sums of log-probs and advantages, over all ranks.
    """
    count, of_logprobs, of_advantages = sums
    product = (logprobs - of_logprobs / count) * (advantages - of_advantages / count)
    low, high = _COVARIANCES
    return answer_mask & (product > low) & (product < high)


def _sides(cliprange: CLIPRANGE) -> tuple[float, float]:
    return cliprange if isinstance(cliprange, tuple) else (cliprange, cliprange)


def _surrogate(ratio: Tensor, advantages: Tensor, cliprange: CLIPRANGE) -> tuple[Tensor, Tensor]:
    """The larger of the unclipped and the clipped loss, and where it is the clipped one, which has
    no gradient.
    """
    low, high = _sides(cliprange)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    return torch.max(unclipped, clipped), clipped > unclipped


def _inputs(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, answer_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-ratio and advantages, both 0 outside the mask."""
    log_ratio = logprobs.float() - old_logprobs.float().detach()
    return (
        torch.where(answer_mask, log_ratio, 0.0),
        torch.where(answer_mask, advantages.float().detach(), 0.0),
    )


def _summed(losses: Tensor, weights: Tensor | None, answer_mask: Tensor) -> Tensor:
    if weights is None:
        return losses.sum()
    return (losses * torch.where(answer_mask, weights.float().detach(), 0.0)).sum()


def _metrics(
    log_ratio: Tensor, of_clip: Tensor, is_clipped: Tensor, answer_mask: Tensor
) -> dict[str, Tensor]:
    """``of_clip``: the log-ratio that the clip compares, (B, A) or (B, 1)."""
    log_ratio = log_ratio.detach()
    ratio = log_ratio.exp()
    metrics = {
        "clipped": (is_clipped & answer_mask).sum(),
        "clipped_low": (is_clipped & answer_mask & (of_clip < 0)).sum(),
        "approxkl": 0.5 * log_ratio.square().sum(),
        "ratio": torch.where(answer_mask, ratio, 0.0).sum(),
        "ratio_abs_dev": (ratio - 1).abs().sum(),
        "tokens": answer_mask.sum(),
    }
    return {name: value.float() for name, value in metrics.items()}


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, answer_mask: Tensor, cliprange_value: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped squared error of the critic, summed over actions.

    ``0.5 * max((V - R)^2, (clip(V, V_old +- epsilon) - R)^2)``: the value clipping of the original
    PPO implementation (Engstrom et al. 2020, arXiv 2005.12729, section 3).

    Args:
        values: (B, A) of the critic being trained; the only input that gets a gradient.
        old_values, returns: (B, A).
        answer_mask: (B, A) bool.
        cliprange_value: epsilon, in units of the value.

    Returns:
        loss_sum: 0-d fp32.
        metrics: sums ``value_clipped`` (1 where the clipped error is the larger) and ``tokens``.
    """
    values = torch.where(answer_mask, values.float(), 0.0)
    old_values = torch.where(answer_mask, old_values.float().detach(), 0.0)
    returns = torch.where(answer_mask, returns.float().detach(), 0.0)
    near_old = old_values + (values - old_values).clamp(-cliprange_value, cliprange_value)
    unclipped = (values - returns).square()
    clipped = (near_old - returns).square()
    loss_sum = 0.5 * torch.max(unclipped, clipped).sum()
    metrics = {"value_clipped": (clipped > unclipped).sum(), "tokens": answer_mask.sum()}
    return loss_sum, {name: value.detach().float() for name, value in metrics.items()}
