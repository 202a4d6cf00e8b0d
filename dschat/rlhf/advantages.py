"""Fills in an experience's advantages, returns, loss mask and importance weights, by the formulas
that flags name: functions of `dschat.losses`, or the user's, file.py:NAME.

Statistics are over the whole rollout on all ranks, even where one prompt's samples lie on several.
Answers without a score count in none of them and get advantage 0, but for a teacher's.
"""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

import dschat.distributed as dist
from dschat import losses
from dschat.config import RLHFConfig, UserError
from dschat.config.errors import require
from dschat.rlhf.experience import Experience
from dschat.user_code.calls import load, raised
from dschat.user_code.surroundings import restored

_GROUP_ESTIMATORS = {
    "grpo": losses.grpo_advantages,
    "dr_grpo": losses.dr_grpo_advantages,
    "rloo": losses.rloo_advantages,
}


@cache
def group_estimator(name: str) -> Callable[..., Tensor] | None:
    """The function of ``--advantage_estimator`` that takes scores, as `losses.grpo_advantages`
    does; None for an estimator that takes rewards of actions.

    Raises:
        UserError: the user's cannot be found, or does not fit.
    """
    if ":" not in name:
        return _GROUP_ESTIMATORS.get(name)
    scores, groups = torch.zeros(4), torch.tensor([0, 0, 1, 1])
    stats = losses.group_stats(scores, groups, 2)
    return _own("advantage_estimator", name, losses.grpo_advantages, scores, groups, stats)


@cache
def policy_loss(name: str) -> Callable[..., tuple[Tensor, dict[str, Tensor]]]:
    """The function of ``--policy_loss``; raises as `group_estimator` does."""
    if ":" not in name:
        return losses.POLICY_LOSSES[name]
    zeros = torch.zeros(2, 3)
    given = (zeros.clone().requires_grad_(), zeros, zeros, zeros == 0, (0.2, 0.2))
    return _own("policy_loss", name, losses.policy_loss, *given, weights=zeros)


def _own(flag: str, spec: str, like: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The function ``spec``, which takes and returns for these arguments what ``like`` does."""
    label = f"--{flag} {spec}"
    function = restored(label)(load(spec, label))
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):
        names = ", ".join([*list(inspect.signature(like).parameters)[: len(args)], *kwargs])
        raise UserError(f"{label} must be a function of ({names})") from None
    try:
        found = function(*args, **kwargs)
    except Exception as error:
        raise UserError(f"{label} {raised(error)}; fix it") from None
    wanted = _form(like(*args, **kwargs))
    require(_form(found) == wanted, f"{label} must return {wanted}; see {like.__name__}")
    return function


def _form(value: Any) -> str:
    if isinstance(value, tuple):
        return " and ".join(map(_form, value))
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"a tensor of shape {[*value.shape]}{' with a gradient' * value.requires_grad}"


def fill_in_advantages(
    e: Experience, args: RLHFConfig, kl_coef: float, num_groups: int, clip: float | None = None
) -> tuple[Tensor, dict[str, float]]:
    """Collective. Fill in ``e`` by the advantage estimator of ``args``.

    Args:
        kl_coef: weight of the KL in the reward; not used where the KL is in the loss.
        num_groups: prompts of the whole rollout, over all ranks.
        clip: see `token_rewards`.

    Returns:
        rewards: (S, A) fp32.
        corrected: this rank's sums over actions, see `dschat.losses.rollout_weights`.
    """
    rewards = token_rewards(e, args, 0.0 if args.kl_is_in_loss else kl_coef, clip)
    groups = e.numbers // args.num_samples_per_prompt
    if args.advantage_estimator == "gae":
        e.advantages, e.returns = losses.gae(rewards, e.values, e.answer_mask, args.gamma, args.lam)
        if args.whiten_advantages:
            e.advantages = _whitened(e.advantages, e.scored_mask)
    elif estimate := group_estimator(args.advantage_estimator):
        sequence_rewards = rewards.sum(dim=1)
        stats = _global_group_stats(sequence_rewards, e.scored, groups, num_groups)
        advantages = estimate(sequence_rewards, groups, stats)
        e.advantages = advantages.unsqueeze(1).expand_as(rewards)
    else:
        baselined = rewards
        if args.advantage_estimator == "reinforce_pp_baseline":
            without_kl = token_rewards(e, args, 0.0, clip)
            baselined = _minus_group_mean(rewards, without_kl, e, groups, num_groups)
        e.advantages = e.returns = losses.returns_to_go(baselined, e.answer_mask, args.gamma)
        if args.advantage_estimator != "reinforce":
            e.advantages = _whitened(e.advantages, e.scored_mask)
    e.advantages = torch.where(e.scored_mask, e.advantages, 0.0)
    e.loss_mask = e.answer_mask if args.has_teacher else e.scored_mask
    if args.has_teacher and not args.distill_top_k:
        # Per action and with its own discount, whatever the estimator; without a score too.
        distilled = losses.distillation_advantages(
            e.logprobs, e.teacher_logprobs, e.answer_mask, args.distill_gamma
        )
        e.advantages = e.advantages + args.distill_coef * distilled
        e.advantages = torch.where(e.answer_mask, e.advantages, 0.0)
    if args.overlong_filter:
        e.loss_mask = e.loss_mask & e.finished.unsqueeze(1)
    e.weights, corrected = losses.rollout_weights(
        e.logprobs, e.rollout_logprobs, e.answer_mask, args.rollout_is, *args.importance_range
    )
    return rewards, {name: float(value) for name, value in corrected.items()}


def token_rewards(e: Experience, args: RLHFConfig, kl_coef: float, clip: float | None) -> Tensor:
    """The reward of every action: (S, A) fp32, 0 outside the answers.

    An answer's rewards sum to its score clipped to +- ``clip`` (None: not clipped), minus
    ``missing_eos_penalty`` where the answer is unfinished, minus the overlong penalty, minus
    ``kl_coef`` times its KL. Token scores stay at their actions, unclipped; everything else,
    the effect of the clip included, is added at the last action.
    """
    # Not even multiplied by 0: k3 may be infinite where the policy nearly excludes a drawn token.
    kl = torch.zeros_like(e.logprobs)
    if kl_coef != 0:
        kl = losses.kl_penalty(e.logprobs, e.ref_logprobs, args.kl_by)
    scores = losses.clip_scores(e.scores, clip) - e.token_scores.sum(dim=1)
    scores = scores - args.missing_eos_penalty * (~e.finished).float()
    scores = scores + losses.overlong_penalty(
        e.answer_mask.sum(dim=1),
        args.max_answer_seq_len,
        args.overlong_buffer_len,
        args.overlong_penalty,
    )
    token_scores = torch.where(e.answer_mask, e.token_scores, 0.0)
    return losses.shape_rewards(scores, kl, e.answer_mask, kl_coef) + token_scores


def _minus_group_mean(
    rewards: Tensor, without_kl: Tensor, e: Experience, groups: Tensor, num_groups: int
) -> Tensor:
    """REINFORCE++-baseline (arXiv 2501.03262): subtract the group mean of the rewards without KL.

    The mean is taken off at the last action of each answer.
    """
    sequence_rewards = without_kl.sum(dim=1)
    stats = _global_group_stats(sequence_rewards, e.scored, groups, num_groups)
    minus_mean = losses.dr_grpo_advantages(sequence_rewards, groups, stats) - sequence_rewards
    no_kl = torch.zeros_like(rewards)
    return rewards + losses.shape_rewards(minus_mean, no_kl, e.answer_mask, 0.0)


def _global_group_stats(scores: Tensor, scored: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    """Collective. `group_stats` of the scored answers, over all ranks."""
    return dist.all_reduce_sum(losses.group_stats(scores[scored], groups[scored], num_groups))


def _whitened(x: Tensor, mask: Tensor) -> Tensor:
    """Collective. ``x`` whitened by the statistics of all ranks."""
    return losses.whiten(x, mask, *dist.all_reduce_sum(losses.masked_whiten_stats(x, mask)))
