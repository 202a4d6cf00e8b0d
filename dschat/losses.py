"""The arithmetic of the three steps: log-probs, entropy, KL, rewards, advantages, losses.

Comes in: tensors. Goes out: tensors, and for a loss ``(loss_sum, metrics)``. Every reduction is a
SUM, with its count beside it: the trainer divides by the tokens of the whole optimizer step over
all ranks, so that the update is the same however the batch is cut. This module must not know ranks,
models, tokenizers or configs; nothing here communicates or moves a tensor to another device.

Conventions. B batch, T sequence, A answer (one column per action), V vocabulary. Masks are bool.
Inputs may be of any float dtype, results are fp32. Where a mask is False nothing leaks, NaN and inf
included: values are replaced by ``torch.where`` before any ``exp`` or product, because the gradient
of ``0 * inf`` is NaN. Metrics are detached 0-d fp32 sums on the inputs' device.
"""

import math
from collections.abc import Iterator
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

# fp32 elements of one temporary over the vocabulary (16 MiB). On two CPU cores 2^18 to 2^22 run
# alike, as fast as log_softmax on the whole; a GPU wants few launches: so the largest of these.
_CHUNK_ELEMENTS = 1 << 22


def _chunks(logits: Tensor) -> Iterator[tuple[slice, slice]]:
    """Index pairs (batch, time) that cut (B, T, V) into parts of at most ``_CHUNK_ELEMENTS``.

    Slices, not a flattened view: ``logits[:, :-1]`` cannot be flattened without a copy.
    """
    num_rows, seq_len, vocab = logits.shape
    rows = max(1, _CHUNK_ELEMENTS // max(1, seq_len * vocab))
    steps = min(max(1, seq_len), max(1, _CHUNK_ELEMENTS // max(1, vocab)))
    for b in range(0, num_rows, rows):
        for t in range(0, seq_len, steps):
            yield slice(b, b + rows), slice(t, t + steps)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """fp32 logits / T. NOTE: may be ``logits`` itself; never write into it."""
    logits = logits.float()
    return logits if temperature == 1.0 else logits / temperature


def _checked_temperature(temperature: float) -> float:
    """T of the log-probs: greedy decoding (temperature 0) is scored at T = 1."""
    assert temperature >= 0, f"temperature {temperature} is negative"
    return float(temperature) or 1.0


class _TokenLogprobs(torch.autograd.Function):
    """Gathered log-softmax that keeps the logits as they are plus one fp32 number a token.

    Plain autograd would keep a whole fp32 (B, T, V) for the backward pass: twice bf16 logits.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, target_ids: Tensor, temperature: float) -> Tensor:
        logsumexp = torch.empty(logits.shape[:-1], dtype=torch.float32, device=logits.device)
        for chunk in _chunks(logits):
            logsumexp[chunk] = torch.logsumexp(_scaled(logits[chunk], temperature), dim=-1)
        picked = logits.gather(-1, target_ids.unsqueeze(-1)).squeeze(-1)
        ctx.save_for_backward(logits, target_ids, logsumexp)
        ctx.temperature = temperature
        return _scaled(picked, temperature) - logsumexp

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor, None, None]:
        logits, target_ids, logsumexp = ctx.saved_tensors
        scale = (grad_output.float() / ctx.temperature).unsqueeze(-1)  # (B, T, 1)
        grad = torch.empty_like(logits)
        for chunk in _chunks(logits):
            log_p = _scaled(logits[chunk], ctx.temperature) - logsumexp[chunk].unsqueeze(-1)
            part = log_p.exp_().mul_(-scale[chunk])
            part.scatter_add_(-1, target_ids[chunk].unsqueeze(-1), scale[chunk])
            # A masked token comes with gradient 0; its logits may be garbage, and 0 * NaN is NaN.
            grad[chunk] = part.masked_fill_(scale[chunk] == 0, 0.0)
        return grad, None, None


def token_logprobs(logits: Tensor, target_ids: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-prob of each target under the distribution at its own position.

    ``log_softmax(logits / T)[target]``, in fp32, of the raw logits: before any truncation or
    penalty. The caller aligns: ``logits[b, t]`` must be the prediction of ``target_ids[b, t]``.
    Differentiable once. The backward pass needs the logits unchanged; its gradient has their dtype.

    Args:
        logits: (B, T, V), any float dtype.
        target_ids: (B, T) int64, every one in [0, V), under a mask or not.
        temperature: T; 0 (greedy) counts as 1.

    Returns:
        (B, T) fp32.
    """
    return _TokenLogprobs.apply(logits, target_ids, _checked_temperature(temperature))


@torch.no_grad()
def entropy_from_logits(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Entropy in nats of ``softmax(logits / T)``: (B, T, V) any float -> (B, T) fp32. No gradient.

    A logit of -inf is a token of probability 0 and adds nothing. T = 0 (greedy) counts as 1.
    """
    temperature = _checked_temperature(temperature)
    entropy = torch.empty(logits.shape[:-1], dtype=torch.float32, device=logits.device)
    for chunk in _chunks(logits):
        probs = torch.softmax(_scaled(logits[chunk], temperature), dim=-1)
        entropy[chunk] = torch.special.entr(probs).sum(dim=-1)
    return entropy


def kl_penalty(
    logprobs: Tensor, ref_logprobs: Tensor, estimator: Literal["k1", "k2", "k3"]
) -> Tensor:
    """Per-token estimate, in nats, of KL(policy || reference) from tokens the policy sampled.

    Schulman 2020, "Approximating KL divergence" (joschu.net/blog/kl-approx.html), with
    d = log policy - log reference: k1 = d (unbiased, may be negative); k2 = d^2 / 2 (biased, low
    variance); k3 = exp(-d) - 1 + d (unbiased, never negative). Any shape in, the same shape out,
    fp32. Garbage outside a mask stays garbage here; ``shape_rewards`` drops it.
    """
    log_ratio = logprobs.float() - ref_logprobs.float()
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    assert estimator == "k3", f"no KL estimator {estimator!r}; there are k1, k2 and k3"
    return torch.expm1(-log_ratio) + log_ratio


@torch.no_grad()
def shape_rewards(
    scores: Tensor, kl: Tensor, answer_mask: Tensor, kl_coef: float, clip_reward: float
) -> Tensor:
    """Reward of every action: ``-kl_coef * kl``, and the clipped score on top of the last.

    Ouyang et al. 2022 (arXiv 2203.02155, eq. 2), whose KL is spread over the tokens it sums.

    Args:
        scores: (B,) one score per sequence, clipped to +- ``clip_reward``.
        kl: (B, A) per-token estimate in nats.
        answer_mask: (B, A) bool. A row without actions gets zeros; its score goes nowhere.

    Returns:
        (B, A) fp32, 0 outside the mask.
    """
    rewards = torch.where(answer_mask, -kl_coef * kl.float(), 0.0)
    actions_from_here = answer_mask.flip(1).cumsum(dim=1).flip(1)
    is_last = answer_mask & (actions_from_here == 1)
    score = scores.float().clamp(-clip_reward, clip_reward).unsqueeze(1)
    return torch.where(is_last, rewards + score, rewards)


@torch.no_grad()
def gae(
    rewards: Tensor, values: Tensor, answer_mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates, value targets (Schulman et al., arXiv 1506.02438, eq. 16).

    ``delta_t = r_t + gamma * V_{t+1} - V_t``; ``A_t = delta_t + gamma * lam * A_{t+1}``; both V and
    A after the last action are 0 (the episode ends there, truncated or not). Returns are A + V.

    Args:
        rewards, values: (B, A) any float; ``values[:, t]`` is of the state before action t.
        answer_mask: (B, A) bool, True first and then False: a gap would break the chain.

    Returns:
        advantages, returns: (B, A) fp32, 0 outside the mask. Not whitened.
    """
    assert not bool((answer_mask[:, 1:] & ~answer_mask[:, :-1]).any()), "answer_mask has a gap"
    rewards = torch.where(answer_mask, rewards.float(), 0.0)
    values = torch.where(answer_mask, values.float(), 0.0)
    advantages = torch.zeros_like(rewards)
    next_value = next_advantage = rewards.new_zeros(rewards.shape[0])
    for t in reversed(range(rewards.shape[1])):
        # Right of the mask everything is 0, so the recursion enters the last action with zeros.
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = delta + gamma * lam * next_advantage
        advantages[:, t] = next_advantage
        next_value = values[:, t]
    return advantages, advantages + values


@torch.no_grad()
def masked_whiten_stats(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Count, sum and sum of squares of ``x`` where ``mask`` holds: three 0-d float64 tensors.

    They add up over ranks, so one all-reduce of the three stands between this and ``whiten``.
    One pass is enough: ``E[x^2] - E[x]^2`` loses ``1e-16 * (mean / std)^2`` of the variance in
    float64, and fp32 inputs have themselves no digits left to whiten long before that matters.
    """
    kept = torch.where(mask, x, 0.0).double()
    return mask.sum().double(), kept.sum(), kept.square().sum()


@torch.no_grad()
def whiten(x: Tensor, mask: Tensor, count: Tensor, total: Tensor, total_sq: Tensor) -> Tensor:
    """Shift and scale ``x`` where masked to mean 0 and (biased) variance 1; eps 1e-8 in the root.

    Args:
        x, mask: any one shape, float and bool.
        count, total, total_sq: of the whole population, as ``masked_whiten_stats`` gives them,
            summed over ranks. A count of 1 has no spread: its mean is taken off, nothing scaled.

    Returns:
        The shape of ``x``, fp32, 0 outside the mask.
    """
    mean = total / count.clamp(min=1)
    variance = (total_sq / count.clamp(min=1) - mean.square()).clamp(min=0)
    scale = torch.where(count > 1, torch.rsqrt(variance + 1e-8), 1.0)
    return torch.where(mask, (x.double() - mean) * scale, 0.0).float()


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


def pairwise_loss(
    chosen_scores: Tensor, rejected_scores: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Bradley-Terry loss ``-log sigmoid(chosen - rejected)``, summed (Ouyang et al. 2022, eq. 1).

    Args:
        chosen_scores, rejected_scores: (B,), any float. B may be 0 (a rank without rows): loss 0,
            still connected to the scores, so that its backward pass runs.

    Returns:
        loss_sum: 0-d fp32.
        metrics: sums over pairs of ``correct`` (a tie counts 0.5), ``margin``, ``chosen``,
            ``rejected``; and ``pairs``, their count.
    """
    chosen_scores, rejected_scores = chosen_scores.float(), rejected_scores.float()
    margin = chosen_scores - rejected_scores
    loss_sum = -F.logsigmoid(margin).sum()
    metrics = {
        "correct": (0.5 * (margin > 0) + 0.5 * (margin >= 0)).sum(),
        "margin": margin.sum(),
        "chosen": chosen_scores.sum(),
        "rejected": rejected_scores.sum(),
        "pairs": torch.full_like(margin, 1.0).sum(),
    }
    return loss_sum, {name: value.detach() for name, value in metrics.items()}


def lm_loss(logits: Tensor, input_ids: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Next-token cross entropy in nats, summed over the tokens that ``loss_mask`` marks as TARGETS.

    Token t is predicted by ``logits[:, t - 1]``; token 0 is predicted by nothing and never counts,
    marked or not. Ids outside the mask may be anything, -100 included.

    Args:
        logits: (B, T, V), any float dtype.
        input_ids: (B, T) int64.
        loss_mask: (B, T) bool.

    Returns:
        loss_sum: 0-d fp32.
        num_tokens: 0-d int64, the targets counted.
    """
    # Ids and mask are shifted, not the logits: a slice of the logits would cost one more (B, T, V)
    # gradient buffer. The last position predicts nothing.
    mask = torch.zeros_like(loss_mask)
    mask[:, :-1] = loss_mask[:, 1:]
    targets = torch.where(mask, input_ids.roll(-1, dims=1), 0)
    logprobs = torch.where(mask, token_logprobs(logits, targets), 0.0)
    return -logprobs.sum(), mask.sum()


class AdaptiveKL:
    """The KL coefficient, steered to a target (Ziegler et al. 2019, arXiv 1909.08593, sec. 2.2).

    ``error = clip((kl - target) / target, -0.2, 0.2)``; ``value *= 1 + error * n / horizon``. So
    the paper's gain is ``n / horizon``; it is held at 1 or below, for beyond 5 the factor turns
    negative.

    Args:
        init: the coefficient to begin with.
        target: KL per sequence in nats, > 0; None keeps the coefficient fixed.
        horizon: time constant in sequences, > 0.
    """

    def __init__(self, init: float, target: float | None, horizon: float) -> None:
        assert target is None or target > 0, f"KL target {target} must be positive"
        assert horizon > 0, f"KL horizon {horizon} must be positive"
        self.value = float(init)
        self.target = target
        self.horizon = horizon

    def update(self, kl: float, n: int) -> None:
        """Take in the mean KL per sequence (nats) of ``n`` sequences, over all ranks.

        A NaN is ignored: it would stay in the coefficient for the rest of the run.
        """
        if self.target is None or math.isnan(kl):
            return
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * min(n / self.horizon, 1.0)
