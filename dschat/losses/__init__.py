"""Log-probs, entropy, KL, rewards, advantages and losses: pure functions of tensors.

A loss returns ``(loss_sum, metrics)``. Every reduction is a SUM, returned with its count: the
trainer divides by the tokens of the whole optimizer step over all ranks, so that the update does
not depend on how the batch is split. Nothing here communicates or moves a tensor to another device.

Conventions. B batch, S sequences of a rollout, T sequence length, A answer (one column per action),
V vocabulary. Masks are bool. Inputs may have any float dtype, results are fp32. Values outside a
mask, NaN and inf included, never reach a result or a gradient: ``torch.where`` replaces them before
any ``exp`` or product, because the gradient of ``0 * inf`` is NaN. Metrics are detached 0-d fp32
sums on the inputs' device.
"""

from dschat.losses.advantages import (
    AdaptiveKL,
    clip_scores,
    distillation_advantages,
    dr_grpo_advantages,
    gae,
    gdpo_advantages,
    group_has_variance,
    group_stats,
    grpo_advantages,
    kl_penalty,
    masked_whiten_stats,
    overlong_penalty,
    returns_to_go,
    rloo_advantages,
    shape_rewards,
    top_k_reverse_kl,
    whiten,
)
from dschat.losses.logprobs import linear_logprobs, linear_top_ids
from dschat.losses.policy import (
    aggregation_count,
    aggregation_weights,
    cispo_loss,
    gspo_loss,
    is_covariant,
    off_policy_mask,
    ppo_loss,
    rollout_weights,
    sapo_loss,
    value_loss,
)
from dschat.losses.preference import dpo_loss, ipo_loss, kto_loss, pairwise_loss
