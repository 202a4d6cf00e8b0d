"""Computes advantages from a teacher's log-probs of sampled actions."""

import torch
from torch import Tensor

from dschat.losses.advantages import returns_to_go


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
