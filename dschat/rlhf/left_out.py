"""Leaves single tokens out of the policy's loss: those of low entropy, or that Clip-Cov draws.

Which ones depends on the whole rollout over all ranks, not on how it is cut into steps. Their
importance weights become 0: they still count in the mean, and in the losses of KL and entropy.
"""

import numpy as np
import torch
from torch import Tensor

import dschat.distributed as dist
from dschat import losses
from dschat.config import RLHFConfig
from dschat.losses.policy import CLIP_COV_SHARE
from dschat.rlhf.experience import Experience


def leave_out(e: Experience, args: RLHFConfig, iteration: int) -> dict[str, float]:
    """Collective. Set the weights of tokens that the flags leave out to 0; metrics."""
    metrics = {}
    if args.top_entropy_share < 1:
        smallest = _quantile(e.entropy[e.loss_mask], 1 - args.top_entropy_share)
        e.weights = torch.where(e.entropy >= smallest, e.weights, 0.0)
        metrics["policy/top_entropy_from"] = smallest
    if args.loss_of_policy.clips_covariance:
        is_out, share = _clip_cov(e, [args.seed, iteration])
        e.weights = torch.where(is_out, 0.0, e.weights)
        metrics["policy/clip_cov_share"] = share
    return metrics


def _quantile(values: Tensor, q: float) -> float:
    """Collective. The quantile ``q`` of all ranks' values, linear between two; 0 without any."""
    every = np.concatenate(dist.gather_objects(values.double().numpy()))
    return float(np.quantile(every, q)) if len(every) else 0.0


def _clip_cov(e: Experience, seed: list[int]) -> tuple[Tensor, float]:
    """Collective. The actions that Clip-Cov leaves out, (S, A) bool, and their share."""
    mask = e.loss_mask
    chosen = [torch.where(mask, x, 0.0).double().sum() for x in (e.logprobs, e.advantages)]
    sums = dist.all_reduce_sum(torch.stack([mask.sum().double(), *chosen]))
    found = losses.is_covariant(e.logprobs, e.advantages, mask, sums)
    # Each with the same chance, drawn by its place in the rollout: the same on any ranks.
    draws = np.zeros(mask.shape)
    for row, number in enumerate(e.numbers.tolist()):
        draws[row] = np.random.default_rng([*seed, number]).random(mask.shape[1])
    num_found = dist.sum_floats([float(found.sum())])[0]
    wanted = max(CLIP_COV_SHARE * float(sums[0]), 1.0)
    is_out = found & (torch.from_numpy(draws) < wanted / max(num_found, 1.0))
    num_out = dist.sum_floats([float(is_out.sum())])[0]
    return is_out, num_out / max(float(sums[0]), 1.0)
