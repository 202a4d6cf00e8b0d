"""Computes the actor's loss of a micro-batch: policy, KLs to reference and teacher, entropy."""

import torch
from torch import Tensor

from dschat import losses
from dschat.config import RLHFConfig
from dschat.models.routing import add_router_loss
from dschat.rlhf.engine import DeepSpeedRLHFEngine
from dschat.rlhf.experience import Experience
from dschat.rlhf.formulas import policy_loss
from dschat.rlhf.forwards import action_logprobs
from dschat.rlhf.metrics import mismatch_sums
from dschat.runtime.optimizer_step import DeviceSums


def actor_loss(
    engine: DeepSpeedRLHFEngine,
    args: RLHFConfig,
    batch: Experience,
    kl_coef: float,
    measures_gap: bool,
) -> tuple[Tensor, DeviceSums]:
    """Collective. The loss, summed over actions with the weights of the aggregation.

    Args:
        kl_coef: weight of the KL in the loss; not used where the KL is in the reward.
        measures_gap: also sum up the gap to the generator's log-probs.

    Returns:
        loss: 0-d fp32, with a gradient.
        sums: of metrics.
    """
    mask = batch.loss_mask
    logprobs, entropy = action_logprobs(
        engine.actor, batch, args.temperature, args.entropy_coef > 0
    )
    of_candidates = batch.teacher_candidates
    if logprobs.dim() == 3:  # and log-probs of the teacher's candidates
        logprobs, of_candidates = logprobs[:, :, 0], logprobs[:, :, 1:]
    # The only step of an experience starts from the policy that the ratio divides by.
    is_on_policy = args.old_logprobs == "auto" and args.ppo_epochs * batch.num_mini_batches == 1
    old_logprobs = logprobs.detach() if is_on_policy else batch.logprobs
    weights = losses.aggregation_weights(mask, args.aggregation, args.max_answer_seq_len)
    weights_of_policy, off_policy = weights * batch.weights, None
    if args.off_policy_mask_threshold is not None:
        drawn = batch.rollout_logprobs, batch.advantages, mask, args.off_policy_mask_threshold
        off_policy = mask & ~losses.off_policy_mask(logprobs, *drawn)
        weights_of_policy = torch.where(off_policy, 0.0, weights_of_policy)
    loss, metrics = policy_loss(args.policy_loss)(
        logprobs,
        old_logprobs,
        batch.advantages,
        mask,
        args.cliprange_sides,
        weights=weights_of_policy,
        **({} if args.dual_clip is None else {"dual_clip": args.dual_clip}),
    )
    sums = {f"policy_{name}": value for name, value in metrics.items()}
    sums["policy_loss"] = loss.detach()
    if off_policy is not None:
        sums["off_policy"] = off_policy.sum()
    if args.kl_is_in_loss and engine.has_reference:
        kl = losses.kl_penalty(logprobs, batch.ref_logprobs, args.kl_by)
        if args.use_bias_correction_kl:  # with its gradient, arXiv 2512.02556, eq. 7
            kl = kl * (logprobs - old_logprobs).exp()
        kl = (weights * torch.where(mask, kl, 0.0)).sum()
        if kl_coef:  # 0 times an infinite KL is NaN
            loss = loss + kl_coef * kl
        sums["kl_loss"] = kl.detach()
    if args.distill_top_k:
        kl = losses.top_k_reverse_kl(
            of_candidates, batch.teacher_candidates, batch.candidates, mask
        )
        kl = (weights * kl).sum()
        loss = loss + args.distill_coef * kl
        sums["distill_loss"] = kl.detach()
    if entropy is not None:
        bonus = (weights * torch.where(mask, entropy, 0.0)).sum()
        loss = loss - args.entropy_coef * bonus
        sums["entropy"] = bonus.detach()
    if measures_gap:
        sums |= mismatch_sums(logprobs.detach(), batch)
    assert batch.rows is not None
    weight = losses.aggregation_count(mask, args.aggregation)
    loss, sums = add_router_loss(engine.actor, loss, sums, batch.rows, weight)
    return loss, sums
