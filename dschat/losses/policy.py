"""Losses of actor and critic: log-probs or values in, a sum over actions and its metrics out.

Conventions: see `dschat.losses`.
"""

import torch
from torch import Tensor


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    answer_mask: Tensor,
    cliprange: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate (Schulman et al. 2017, arXiv 1707.06347, eq. 7), negated and summed.

    Args:
        logprobs: (B, A) of the policy being trained; the only input that gets a gradient.
        old_logprobs: (B, A) of the policy at the start of the update.
        advantages: (B, A).
        answer_mask: (B, A) bool.
        cliprange: epsilon; the ratio is clipped to [1 - epsilon, 1 + epsilon].

    Returns:
        loss_sum: 0-d fp32; non-finite if a ratio leaves fp32's range (e^88), a step to skip.
        metrics: sums over actions of ``clipped`` (1 where the clipped term is the larger loss, so
            that the action has no gradient), ``approxkl`` (half the squared log-ratio), ``ratio``,
            ``ratio_abs_dev`` (|ratio - 1|); and ``tokens``, their count.
    """
    log_ratio = torch.where(answer_mask, logprobs.float() - old_logprobs.float().detach(), 0.0)
    advantages = torch.where(answer_mask, advantages.float().detach(), 0.0)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - cliprange, 1 + cliprange)
    loss_sum = torch.max(unclipped, clipped).sum()

    log_ratio, ratio = log_ratio.detach(), ratio.detach()
    metrics = {
        "clipped": (clipped > unclipped).sum(),
        "approxkl": 0.5 * log_ratio.square().sum(),
        "ratio": torch.where(answer_mask, ratio, 0.0).sum(),
        "ratio_abs_dev": (ratio - 1).abs().sum(),
        "tokens": answer_mask.sum(),
    }
    return loss_sum, {name: value.detach().float() for name, value in metrics.items()}


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, answer_mask: Tensor, cliprange_value: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped squared error of the critic, summed over actions.

    ``0.5 * max((V - R)^2, (clip(V, V_old +- epsilon) - R)^2)``, the value clipping of PPO's first
    implementation (Engstrom et al. 2020, arXiv 2005.12729, section 3).

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
