"""Fills in an experience's advantages, returns, loss mask and importance weights, by the formulas
that flags name.

Statistics are over the whole rollout on all ranks, even where one prompt's samples lie on several.
Answers without a score count in none of them and get advantage 0, but for a teacher's.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

import dschat.distributed as dist
from dschat import losses
from dschat.config import RLHFConfig
from dschat.rlhf.experience import Experience
from dschat.rlhf.formulas import estimator


@dataclass
class Given:
    """What an estimator may take: its parameters name attributes of this class.

    NOTE: statistics are collective. They are computed where they are asked for, which is in the
    order of the parameters and so the same on all ranks.
    """

    e: Experience
    args: RLHFConfig
    num_groups: int
    clip: float | None
    weights: Mapping[str, float]  # of sources, by name
    rewards: Tensor  # (S, A) fp32

    @property
    def values(self) -> Tensor:  # (S, A)
        return self.e.values

    @property
    def answer_mask(self) -> Tensor:  # (S, A)
        return self.e.answer_mask

    @property
    def gamma(self) -> float:
        return self.args.gamma

    @property
    def lam(self) -> float:
        return self.args.lam

    @property
    def group_ids(self) -> Tensor:  # (S,)
        return self.e.numbers // self.args.num_samples_per_prompt

    @property
    def scores(self) -> Tensor:
        return episode_rewards(self.e, self.args, self.rewards, self.clip)

    @property
    def scores_without_kl(self) -> Tensor:
        rewards = token_rewards(self.e, self.args, 0.0, self.clip)
        return self.e.episode_means(rewards.sum(dim=1))

    @property
    def stats(self) -> Tensor:
        """Collective. `group_stats` of the scored answers, over all ranks: (3, G)."""
        return self._stats_of(self.scores)

    @property
    def stats_without_kl(self) -> Tensor:
        """Collective."""
        return self._stats_of(self.scores_without_kl)

    @property
    def source_scores(self) -> Tensor:
        """Of each source, and the penalties of the answer's length: (S, K + 1)."""
        eos, overlong = _penalties(self.e, self.args)
        scores = self.e.by_source(self.weights)
        return torch.cat([scores, (overlong - eos).unsqueeze(1)], dim=1)

    @property
    def source_weights(self) -> Tensor:
        return torch.tensor([*self.weights.values(), 1.0])

    @property
    def source_stats(self) -> Tensor:
        """Collective."""
        counted = self.e.scored & self.e.first_rows
        scores = torch.where(counted.unsqueeze(1), self.source_scores, torch.nan)
        return source_stats(scores, self.group_ids, self.num_groups)

    def _stats_of(self, scores: Tensor) -> Tensor:
        scored = self.e.scored & self.e.first_rows
        own = losses.group_stats(scores[scored], self.group_ids[scored], self.num_groups)
        return dist.all_reduce_sum(own)


def source_stats(scores: Tensor, group_ids: Tensor, num_groups: int) -> Tensor:
    """Collective. `group_stats` of each source, over all ranks: (K, 3, G).

    ``scores`` (S, K), NaN where a source declined, which then does not count.
    """
    own = []
    for column in scores.T:
        valid = ~column.isnan()
        own.append(losses.group_stats(column[valid], group_ids[valid], num_groups))
    return dist.all_reduce_sum(torch.stack(own))


def fill_in_advantages(
    e: Experience,
    args: RLHFConfig,
    kl_coef: float,
    num_groups: int,
    clip: float | None = None,
    weights: Mapping[str, float] | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Collective. Fill in ``e`` by the advantage estimator of ``args``.

    Args:
        kl_coef: weight of the KL in the reward; not used where the KL is in the loss.
        num_groups: prompts of the whole rollout, over all ranks.
        clip: see `token_rewards`.
        weights: by name, of the sources that `Experience.source_scores` has.

    Returns:
        rewards: (S, A) fp32.
        corrected: this rank's sums over actions, see `dschat.losses.rollout_weights`.
    """
    rewards = token_rewards(e, args, 0.0 if args.kl_is_in_loss else kl_coef, clip)
    function, takes = estimator(args.advantage_estimator)
    given = Given(e, args, num_groups, clip, weights or {}, rewards)
    found = function(*(getattr(given, name) for name in takes))
    if isinstance(found, tuple):
        e.advantages, e.returns = found
    elif found.dim() == 2:
        e.advantages = e.returns = found
    else:
        e.advantages = found.unsqueeze(1).expand_as(rewards)
    if args.estimator.whitens and (args.whiten_advantages or not args.has_critic):
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
    eos, overlong = _penalties(e, args)
    scores = scores - eos + overlong
    token_scores = torch.where(e.answer_mask, e.token_scores, 0.0)
    return losses.shape_rewards(scores, kl, e.answer_mask, kl_coef) + token_scores


def episode_rewards(e: Experience, args: RLHFConfig, rewards: Tensor, clip: float | None) -> Tensor:
    """The sum of an answer's ``rewards`` (S, A): (S,). The rows of an episode share its score, and
    their KL adds up, as if they were one.
    """
    sums = rewards.sum(dim=1)
    if e.first_rows.all():
        return sums
    plain = token_rewards(e, args, 0.0, clip).sum(dim=1)
    return e.episode_means(plain) + e.episode_means(sums - plain, total=True)


def _penalties(e: Experience, args: RLHFConfig) -> tuple[Tensor, Tensor]:
    """Of an answer without EOS, to subtract, and of a long one, to add: (S,) each."""
    longest, buffer = args.max_answer_seq_len, args.overlong_buffer_len
    lengths = e.answer_mask.sum(dim=1)
    overlong = losses.overlong_penalty(lengths, longest, buffer, args.overlong_penalty)
    return args.missing_eos_penalty * (~e.finished).float(), overlong


def _whitened(x: Tensor, mask: Tensor) -> Tensor:
    """Collective. ``x`` whitened by the statistics of all ranks."""
    return losses.whiten(x, mask, *dist.all_reduce_sum(losses.masked_whiten_stats(x, mask)))
