"""Losses of pairs: what people preferred against what they did not.

Conventions: see `dschat.losses`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


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
