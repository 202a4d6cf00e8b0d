"""From scores, log-probs and values to rewards and advantages, by the estimator of the run.

An experience of this rank comes in; its ``advantages``, ``returns``, ``loss_mask`` and ``weights``
are filled in. Statistics are those of the whole rollout, over all ranks, even where a prompt's
samples lie on several. Answers without a score are in none of them and have advantage 0. It must
not know models; the formulas are those of `dschat.losses`.
"""

import torch
from torch import Tensor

import dschat.distributed as dist
from dschat.config import RLHFConfig
from dschat.losses import (
    clip_scores,
    dr_grpo_advantages,
    gae,
    group_stats,
    grpo_advantages,
    kl_penalty,
    masked_whiten_stats,
    overlong_penalty,
    returns_to_go,
    rloo_advantages,
    rollout_weights,
    shape_rewards,
    whiten,
)
from dschat.rlhf.experience import Experience

_OF_GROUPS = {
    "grpo": grpo_advantages,
    "dr_grpo": dr_grpo_advantages,
    "rloo": rloo_advantages,
}


def fill_in_advantages(
    e: Experience, args: RLHFConfig, kl_coef: float, num_groups: int, clip: float | None = None
) -> tuple[Tensor, dict[str, float]]:
    """Collective. Rewards (S, A), and this rank's sums over actions of what was corrected.

    Args:
        kl_coef: weight of the KL in the reward (none where it is in the loss).
        num_groups: prompts of the whole rollout, over all ranks.
        clip: see `token_rewards`.
    """
    rewards = token_rewards(e, args, 0.0 if args.kl_is_in_loss else kl_coef, clip)
    groups = e.numbers // args.num_samples_per_prompt
    if args.advantage_estimator == "gae":
        e.advantages, e.returns = gae(rewards, e.values, e.answer_mask, args.gamma, args.lam)
        if args.whiten_advantages:
            e.advantages = _whitened(e.advantages, e.scored_mask)
    elif args.advantage_estimator in _OF_GROUPS:
        of_sequence = rewards.sum(dim=1)
        stats = _of_all_ranks(of_sequence, e.scored, groups, num_groups)
        advantages = _OF_GROUPS[args.advantage_estimator](of_sequence, groups, stats)
        e.advantages = advantages.unsqueeze(1).expand_as(rewards)
    else:
        left = rewards
        if args.advantage_estimator == "reinforce_pp_baseline":
            without_kl = token_rewards(e, args, 0.0, clip)
            left = _less_group_mean(rewards, without_kl, e, groups, num_groups)
        e.advantages = e.returns = returns_to_go(left, e.answer_mask, args.gamma)
        if args.advantage_estimator != "reinforce":
            e.advantages = _whitened(e.advantages, e.scored_mask)
    e.advantages = torch.where(e.scored_mask, e.advantages, 0.0)
    e.loss_mask = e.answer_mask.clone()
    if args.overlong_filter:
        e.loss_mask &= e.finished.unsqueeze(1)
    e.weights, corrected = rollout_weights(
        e.logprobs, e.rollout_logprobs, e.answer_mask, args.rollout_is, *args.rollout_is_range
    )
    return rewards, {name: float(value) for name, value in corrected.items()}


def token_rewards(e: Experience, args: RLHFConfig, kl_coef: float, clip: float | None) -> Tensor:
    """The reward of every action: (S, A) fp32, 0 outside the answers.

    An answer's rewards sum up to its score, clipped to +- ``clip`` (None: as it is), less
    ``missing_eos_penalty`` where it is unfinished, what its length costs, and ``kl_coef`` times its
    KL. Scores of single actions stand at theirs, as they are; the rest at the last action, and what
    the clip takes off, it takes there.
    """
    # Without weight it may still be infinite: k3, where the policy all but excludes what it drew.
    kl = torch.zeros_like(e.logprobs)
    if kl_coef != 0:
        kl = kl_penalty(e.logprobs, e.ref_logprobs, args.kl_by)
    scores = clip_scores(e.scores, clip) - e.token_scores.sum(dim=1)
    scores = scores - args.missing_eos_penalty * (~e.finished).float()
    scores = scores + overlong_penalty(
        e.answer_mask.sum(dim=1),
        args.max_answer_seq_len,
        args.overlong_buffer_len,
        args.overlong_penalty,
    )
    of_tokens = torch.where(e.answer_mask, e.token_scores, 0.0)
    return shape_rewards(scores, kl, e.answer_mask, kl_coef) + of_tokens


def _less_group_mean(
    rewards: Tensor, without_kl: Tensor, e: Experience, groups: Tensor, num_groups: int
) -> Tensor:
    """REINFORCE++-baseline (arXiv 2501.03262): without KL, a group's rewards sum to 0."""
    of_sequence = without_kl.sum(dim=1)
    stats = _of_all_ranks(of_sequence, e.scored, groups, num_groups)
    less = dr_grpo_advantages(of_sequence, groups, stats) - of_sequence
    nothing = torch.zeros_like(rewards)
    return rewards + shape_rewards(less, nothing, e.answer_mask, 0.0)


def _of_all_ranks(scores: Tensor, scored: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    return dist.all_reduce_sum(group_stats(scores[scored], groups[scored], num_groups))


def _whitened(x: Tensor, mask: Tensor) -> Tensor:
    stats = torch.stack(masked_whiten_stats(x, mask))
    return whiten(x, mask, *dist.all_reduce_sum(stats))
