"""Computes per-action rewards and advantages from scores, log-probs, values or a teacher's
log-probs.

All of these are constants of the update: no gradient flows through them. Statistics over the whole
rollout are returned as this rank's sums; the caller adds them up over ranks. Conventions: see
`dschat.losses`.
"""

import math
from typing import Literal

import torch
from torch import Tensor


def kl_penalty(
    logprobs: Tensor, ref_logprobs: Tensor, estimator: Literal["k1", "k2", "k3"]
) -> Tensor:
    """Per-token estimate, in nats, of KL(policy || reference) from tokens the policy sampled.

    Schulman 2020, "Approximating KL divergence" (joschu.net/blog/kl-approx.html), with
    d = log policy - log reference: k1 = d (unbiased, may be negative); k2 = d^2 / 2 (biased, low
    variance); k3 = exp(-d) - 1 + d (unbiased, never negative). Any shape; returns the same shape,
    fp32. Values outside a mask are not replaced here but in `shape_rewards`.
    """
    log_ratio = logprobs.float() - ref_logprobs.float()
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    assert estimator == "k3", f"unknown KL estimator {estimator!r}; choose k1, k2 or k3"
    return torch.expm1(-log_ratio) + log_ratio


def clip_scores(scores: Tensor, bound: float | None) -> Tensor:
    """Clip ``scores`` of any shape to +- ``bound``; None leaves them unclipped. NaN stays NaN."""
    return scores if bound is None else scores.clamp(-bound, bound)


@torch.no_grad()
def shape_rewards(scores: Tensor, kl: Tensor, answer_mask: Tensor, kl_coef: float) -> Tensor:
    """Reward of every action: ``-kl_coef * kl``, plus the score at the last action.

    Ouyang et al. 2022 (arXiv 2203.02155, eq. 2), with the KL's per-token terms at their tokens.

    Args:
        scores: (B,) any float, one score per sequence.
        kl: (B, A) per-token estimate in nats.
        answer_mask: (B, A) bool. A row without actions gets zeros, and its score is dropped.

    Returns:
        (B, A) fp32, 0 outside the mask.
    """
    rewards = torch.where(answer_mask, -kl_coef * kl.float(), 0.0)
    actions_from_here = answer_mask.flip(1).cumsum(dim=1).flip(1)
    is_last = answer_mask & (actions_from_here == 1)
    return torch.where(is_last, rewards + scores.float().unsqueeze(1), rewards)


@torch.no_grad()
def gae(
    rewards: Tensor, values: Tensor, answer_mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (Schulman et al., arXiv 1506.02438, eq. 16).

    ``delta_t = r_t + gamma * V_{t+1} - V_t``; ``A_t = delta_t + gamma * lam * A_{t+1}``; both V and
    A after the last action are 0 (the episode ends there, truncated or not). The returns, the
    critic's targets, are A + V. In an episode of several turns, t + 1 is the next action: the
    environment's tokens between two turns are no steps.

    Args:
        rewards, values: (B, A) any float; ``values[:, t]`` is the value of the state before
            action t.
        answer_mask: (B, A) bool.

    Returns:
        advantages, returns: (B, A) fp32, 0 outside the mask. Not whitened.
    """
    rewards = torch.where(answer_mask, rewards.float(), 0.0)
    values = torch.where(answer_mask, values.float(), 0.0)
    advantages = torch.zeros_like(rewards)
    next_value = next_advantage = rewards.new_zeros(rewards.shape[0])
    for t in reversed(range(rewards.shape[1])):
        is_action = answer_mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        advantages[:, t] = torch.where(is_action, advantage, 0.0)
        next_advantage = torch.where(is_action, advantage, next_advantage)
        next_value = torch.where(is_action, values[:, t], next_value)
    return advantages, advantages + values


@torch.no_grad()
def masked_whiten_stats(x: Tensor, mask: Tensor) -> Tensor:
    """Count, sum and sum of squares of ``x`` where ``mask`` holds: (3,) float64.

    Sum the three over ranks in one all-reduce before `whiten`. One pass is accurate enough:
    ``E[x^2] - E[x]^2`` loses ``1e-16 * (mean / std)^2`` of the variance in float64, and fp32 inputs
    run out of digits long before that matters.
    """
    kept = torch.where(mask, x, 0.0).double()
    return torch.stack([mask.sum().double(), kept.sum(), kept.square().sum()])


@torch.no_grad()
def whiten(x: Tensor, mask: Tensor, count: Tensor, total: Tensor, total_sq: Tensor) -> Tensor:
    """Normalize ``x`` inside ``mask`` to mean 0 and (biased) variance 1, eps 1e-8 in the root.

    Args:
        x, mask: float and bool, of one shape.
        count, total, total_sq: as `masked_whiten_stats` returns them, summed over ranks. With a
            count of 1 the mean is subtracted and nothing is scaled.

    Returns:
        The shape of ``x``, fp32, 0 outside the mask.
    """
    mean = total / count.clamp(min=1)
    variance = (total_sq / count.clamp(min=1) - mean.square()).clamp(min=0)
    scale = torch.where(count > 1, torch.rsqrt(variance + 1e-8), 1.0)
    return torch.where(mask, (x.double() - mean) * scale, 0.0).float()


@torch.no_grad()
def returns_to_go(rewards: Tensor, answer_mask: Tensor, gamma: float) -> Tensor:
    """REINFORCE's return of every action: its reward and the discounted later ones (Williams 1992).

    ``rewards`` (S, A) any float, ``answer_mask`` (S, A) bool; returns (S, A) fp32, 0 outside the
    mask.
    """
    zeros = torch.zeros_like(rewards, dtype=torch.float32)
    return gae(rewards, zeros, answer_mask, gamma, lam=1.0)[0]


@torch.no_grad()
def group_stats(scores: Tensor, group_ids: Tensor, num_groups: int) -> Tensor:
    """Count, sum and sum of squares of the scores of each group: (3, G) float64.

    Sum them over ranks before calling the functions below; a group may be split over ranks.
    ``scores`` (S,) any float; ``group_ids`` (S,) int64 in [0, G).
    """
    scores = scores.double()
    columns = torch.stack([torch.ones_like(scores), scores, scores.square()])
    stats = torch.zeros(3, num_groups, dtype=torch.float64, device=scores.device)
    return stats.index_add_(1, group_ids, columns)


def mean_and_variance(stats: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance (n - 1) of each group, (G,) float64; a variance below rounding is 0."""
    count, total, total_sq = stats
    mean = total / count.clamp(min=1)
    spread = total_sq - total * mean
    # Squares of fp32 numbers are exact in float64, their sums to count x 1e-16: less is rounding.
    spread = torch.where(spread > 1e-16 * count * total_sq, spread, 0.0)
    return mean, spread / (count - 1).clamp(min=1)


def group_has_variance(stats: Tensor) -> Tensor:
    """Whether the scores of a group differ: (3, G) -> (G,) bool.

    A group of equal scores has no advantages; dynamic sampling drops it (DAPO, arXiv 2503.14476,
    eq. 11).
    """
    return mean_and_variance(stats)[1] > 0


@torch.no_grad()
def dr_grpo_advantages(scores: Tensor, group_ids: Tensor, stats: Tensor) -> Tensor:
    """Score minus its group's mean: (S,) fp32 (Dr. GRPO, Liu et al. 2025, arXiv 2503.20783).

    Args:
        scores: (S,) any float; of this rank, where there are several.
        group_ids: (S,) int64 in [0, G).
        stats: (3, G), as `group_stats` returns them, summed over ranks.
    """
    mean, _ = mean_and_variance(stats)
    return (scores.double() - mean[group_ids]).float()


@torch.no_grad()
def grpo_advantages(scores: Tensor, group_ids: Tensor, stats: Tensor, eps: float = 1e-6) -> Tensor:
    """(Score - group mean) / (group standard deviation + eps): (S,) fp32.

    GRPO (Shao et al. 2024, arXiv 2402.03300, section 4.1.2). The deviation divides by n - 1, as in
    TRL and verl; the paper does not say. A group of one gets 0. Arguments as in
    `dr_grpo_advantages`.
    """
    mean, variance = mean_and_variance(stats)
    advantages = (scores.double() - mean[group_ids]) / (variance.sqrt()[group_ids] + eps)
    return torch.where(variance[group_ids] > 0, advantages, 0.0).float()


@torch.no_grad()
def rloo_advantages(scores: Tensor, group_ids: Tensor, stats: Tensor) -> Tensor:
    """Score minus the mean of the other scores of its group: (S,) fp32.

    RLOO (Ahmadian et al. 2024, arXiv 2402.14740). A group of one gets 0. Arguments as in
    `dr_grpo_advantages`.
    """
    count, total, _ = (row[group_ids] for row in stats)
    scores = scores.double()
    others = (total - scores) / (count - 1).clamp(min=1)
    return torch.where(count > 1, scores - others, 0.0).float()


@torch.no_grad()
def baselined_returns(
    rewards: Tensor,
    answer_mask: Tensor,
    gamma: float,
    scores_without_kl: Tensor,
    group_ids: Tensor,
    stats_without_kl: Tensor,
) -> Tensor:
    """`returns_to_go` of rewards less their group's mean: (S, A) fp32.

    REINFORCE++-baseline (arXiv 2501.03262). The mean is of the rewards without KL, and is taken
    off at the last action. Arguments as in `returns_to_go` and `dr_grpo_advantages`.
    """
    scores = scores_without_kl
    minus_mean = dr_grpo_advantages(scores, group_ids, stats_without_kl) - scores
    no_kl = torch.zeros_like(rewards)
    baselined = rewards + shape_rewards(minus_mean, no_kl, answer_mask, 0.0)
    return returns_to_go(baselined, answer_mask, gamma)


@torch.no_grad()
def gdpo_advantages(
    source_scores: Tensor, source_weights: Tensor, group_ids: Tensor, source_stats: Tensor
) -> Tensor:
    """The weighted sum of `grpo_advantages` of each source alone: (S,) fp32, to be whitened.

    GDPO (Liu et al. 2026, arXiv 2601.05242): a source of small numbers, or one that rarely differs
    in a group, counts as much as its weight says.

    Args:
        source_scores: (S, K) any float, NaN where a source declined, which then adds 0.
        source_weights: (K,).
        group_ids: (S,) int64 in [0, G).
        source_stats: (K, 3, G), `group_stats` of each source, summed over ranks.
    """
    total = torch.zeros(len(source_scores))
    for scores, weight, stats in zip(source_scores.T, source_weights, source_stats, strict=True):
        total += weight * grpo_advantages(scores, group_ids, stats).nan_to_num()
    return total


@torch.no_grad()
def overlong_penalty(lengths: Tensor, max_len: int, buffer_len: int, penalty: float) -> Tensor:
    """Soft length penalty of each answer (DAPO, arXiv 2503.14476, eq. 13): (S,) fp32, <= 0.

    0 up to ``max_len - buffer_len`` tokens, then linear, down to ``-penalty`` at ``max_len``.
    ``lengths`` (S,) int64. A buffer of 0 tokens turns the penalty off.
    """
    if buffer_len == 0:
        return torch.zeros_like(lengths, dtype=torch.float32)
    over = (lengths - (max_len - buffer_len)).clamp(0, buffer_len)
    return -penalty * over.float() / buffer_len


class AdaptiveKL:
    """KL coefficient controlled to a target KL (Ziegler et al. 2019, arXiv 1909.08593, sec. 2.2).

    ``error = clip((kl - target) / target, -0.2, 0.2)``; ``value *= 1 + error * n / horizon``. The
    paper's gain is ``n / horizon``, bounded by 1 here: beyond 5 the factor would turn negative.

    Args:
        init: the initial coefficient.
        target: KL per sequence in nats, > 0; None keeps the coefficient fixed.
        horizon: time constant in sequences, > 0.
    """

    def __init__(self, init: float, target: float | None, horizon: float) -> None:
        self.value, self.target, self.horizon = float(init), target, horizon

    def update(self, kl: float, n: int) -> None:
        """Update from the mean KL per sequence (nats) of ``n`` sequences over all ranks.

        NaN and infinity are ignored: they would stay in the coefficient for the rest of the run.
        """
        if self.target is None or not math.isfinite(kl):
            return
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * min(n / self.horizon, 1.0)


# Probability of the ids that are no candidates: less is the rounding of fp32 sums.
_SMALLEST_REST = 1e-6


@torch.no_grad()
def distillation_advantages(
    logprobs: Tensor, teacher_logprobs: Tensor, answer_mask: Tensor, gamma: float
) -> Tensor:
    """The negative reverse KL to the teacher, estimated from sampled actions: (S, A) fp32.

    ``r_t = log teacher - log student`` of the drawn token, an unbiased estimate of
    ``-KL(student || teacher)`` at its position, and ``A_t = sum over k >= t of gamma^(k-t) r_k``.
    With gamma 0, A_t is r_t (Lu and Thinking Machines Lab 2025, "On-policy distillation"): the
    expected policy gradient is that of GKD with the reverse KL on the student's samples (Agarwal et
    al., arXiv 2306.13649), which has no gradient through the sampling of earlier tokens. With gamma
    1 it is that of the reverse KL of whole answers (MiniLLM, Gu et al., arXiv 2306.08543).

    Args:
        logprobs, teacher_logprobs: (S, A) of the drawn tokens.
        answer_mask: (S, A) bool.
    """
    rewards = torch.where(answer_mask, teacher_logprobs.float() - logprobs.float(), 0.0)
    return returns_to_go(rewards, answer_mask, gamma)


def top_k_reverse_kl(
    logprobs: Tensor, teacher_logprobs: Tensor, candidates: Tensor, answer_mask: Tensor
) -> Tensor:
    """KL(student || teacher) at each position over candidate ids and one rest: (S, A) fp32.

    Both distributions are merged outside the candidates into one probability, so that this is a KL
    itself: at most the whole vocabulary's KL, and equal to it where the candidates are all ids.
    GKD (arXiv 2306.13649) with the reverse KL, over the candidates.

    Args:
        logprobs: (S, A, K) of the candidates; the only input that gets a gradient.
        teacher_logprobs: (S, A, K).
        candidates: (S, A, K) ids; of equal ones at a position, the first counts.
        answer_mask: (S, A) bool.
    """
    is_earlier = torch.ones(2 * candidates.shape[-1:], device=candidates.device).tril(-1).bool()
    equal = candidates.unsqueeze(-1) == candidates.unsqueeze(-2)
    counts = ~(equal & is_earlier).any(-1) & answer_mask.unsqueeze(-1)
    student = torch.where(counts, logprobs.float(), -math.inf).exp()
    teacher = torch.where(counts, teacher_logprobs.float().detach(), -math.inf).exp()
    log_ratio = torch.where(counts, logprobs.float() - teacher_logprobs.float().detach(), 0.0)
    rest, of_teacher = ((1 - p.sum(-1)).clamp(min=_SMALLEST_REST) for p in (student, teacher))
    return (student * log_ratio).sum(-1) + rest * (rest / of_teacher).log()
