"""Composes the actor's loss of a micro-batch: policy, KLs to reference and teacher, entropy."""

from typing import Any

import torch
from torch import Tensor

from dschat.config import RLHFConfig
from dschat.losses import POLICY_LOSSES, aggregation_weights, kl_penalty, top_k_reverse_kl
from dschat.models.training_engine import ModelOrEngine
from dschat.rlhf.experience import Experience
from dschat.rlhf.metrics import mismatch_sums
from dschat.rlhf.scoring import action_logprobs
from dschat.runtime.metric_sums import DeviceSums


def actor_loss(
    actor: ModelOrEngine,
    batch: Experience,
    args: RLHFConfig,
    kl_coef: float | None,
    is_on_policy: bool,
    measures_gap: bool,
) -> tuple[Tensor, DeviceSums]:
    """The loss, summed over actions with the weights of the aggregation; and sums of metrics.

    Args:
        kl_coef: weight of the KL to the reference in the loss; None: it is not there.
        is_on_policy: the policy's own log-probs are the old ones.
        measures_gap: count the difference from the generator's log-probs.
    """
    mask = batch.loss_mask
    logprobs, entropy = action_logprobs(actor, batch, args.temperature, args.entropy_coef > 0)
    of_candidates = logprobs[:, :, 1:] if logprobs.dim() == 3 else batch.teacher_candidates
    logprobs = logprobs[:, :, 0] if logprobs.dim() == 3 else logprobs
    weights = aggregation_weights(mask, args.aggregation, args.max_answer_seq_len)
    options: dict[str, Any] = {}
    if args.dual_clip is not None:
        options["dual_clip"] = args.dual_clip
    loss, metrics = POLICY_LOSSES[args.policy_loss](
        logprobs,
        logprobs.detach() if is_on_policy else batch.logprobs,
        batch.advantages,
        mask,
        args.cliprange_sides,
        weights=weights * batch.weights,
        **options,
    )
    named = {f"policy_{name}": value for name, value in metrics.items()}
    named["policy_loss"] = loss.detach()
    if kl_coef is not None:
        kl = torch.where(mask, kl_penalty(logprobs, batch.ref_logprobs, args.kl_by), 0.0)
        kl = (weights * kl).sum()
        loss = loss + kl_coef * kl
        named["kl_loss"] = kl.detach()
    if args.distill_top_k:
        kl = top_k_reverse_kl(of_candidates, batch.teacher_candidates, batch.candidates, mask)
        kl = (weights * kl).sum()
        loss = loss + args.distill_coef * kl
        named["distill_loss"] = kl.detach()
    if entropy is not None:
        bonus = (weights * torch.where(mask, entropy, 0.0)).sum()
        loss = loss - args.entropy_coef * bonus
        named["entropy"] = bonus.detach()
    if measures_gap:
        named |= mismatch_sums(logprobs.detach(), batch)
    return loss, named
