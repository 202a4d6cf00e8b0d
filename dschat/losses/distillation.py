"""Computes advantages from a teacher's log-probs of sampled actions, and the KL over top tokens."""

import math

import torch
from torch import Tensor

from dschat.losses.advantages import returns_to_go

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
    itself: at most that of the whole vocabulary, and equal to it where the candidates are all ids.
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
