"""Losses on pairs of a chosen and a rejected answer: Bradley-Terry, DPO, IPO, KTO.

`pairwise_loss` trains a reward model on scores. The others train the policy on log-ratios
``log policy(answer | prompt) - log reference(answer | prompt)``, each log-prob the sum over the
answer's tokens. Every loss is a sum over pairs; the caller divides by the pairs of the whole
optimizer step. Conventions: see `dschat.losses`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def pairwise_loss(
    chosen_scores: Tensor, rejected_scores: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Bradley-Terry loss ``-log sigmoid(chosen - rejected)``, summed (Ouyang et al. 2022, eq. 1).

    Args:
        chosen_scores, rejected_scores: (B,), any float. B may be 0 (a rank without rows): the loss
            is 0 and still connected to the scores, so that its backward pass runs.
        weights: (B,) of the pairs in the loss; for all pairs of k ranked answers, 1 / their number
            (eq. 1: the mean over the k (k - 1) / 2 pairs of a prompt). None: 1.

    Returns:
        loss_sum: 0-d fp32.
        metrics: unweighted sums over pairs of ``correct`` (a tie counts 0.5), ``margin``,
            ``chosen``, ``rejected``; and ``pairs``, their count.
    """
    chosen_scores, rejected_scores = chosen_scores.float(), rejected_scores.float()
    margin = chosen_scores - rejected_scores
    losses = F.logsigmoid(margin)
    loss_sum = -(losses if weights is None else losses * weights).sum()
    metrics = {
        "correct": _num_right(margin),
        "margin": margin.sum(),
        "chosen": chosen_scores.sum(),
        "rejected": rejected_scores.sum(),
        "pairs": torch.full_like(margin, 1.0).sum(),
    }
    return loss_sum, {name: value.detach() for name, value in metrics.items()}


def dpo_loss(
    chosen_logratios: Tensor, rejected_logratios: Tensor, beta: float, label_smoothing: float = 0.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Direct preference optimization: ``-log sigmoid(beta * (chosen - rejected))``, summed.

    Rafailov et al. 2023 (arXiv 2305.18290), eq. 7. With ``label_smoothing`` e > 0, conservative
    DPO for labels of which a share e is wrong (Mitchell 2023, "A note on DPO with noisy
    preferences"): ``-(1 - e) log sigmoid(h) - e log sigmoid(-h)``.

    Args:
        chosen_logratios, rejected_logratios: (B,), any float; B may be 0.

    Returns:
        loss_sum: 0-d fp32.
        metrics: implicit rewards: ``beta * logratio`` is an answer's reward up to a constant per
            prompt (eq. 5). Sums over pairs of ``rewards/chosen``, ``rewards/rejected``,
            ``rewards/margins`` and ``rewards/accuracies`` (a tie counts 0.5); and ``pairs``,
            their count.
    """
    chosen, rejected = chosen_logratios.float(), rejected_logratios.float()
    margin = beta * (chosen - rejected)
    right, wrong = F.logsigmoid(margin), F.logsigmoid(-margin)
    loss_sum = -((1 - label_smoothing) * right + label_smoothing * wrong).sum()
    return loss_sum, _implicit_rewards(chosen, rejected, beta)


def ipo_loss(
    chosen_logratios: Tensor, rejected_logratios: Tensor, beta: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Identity preference optimization: ``(chosen - rejected - 1 / (2 beta))^2``, summed.

    Azar et al. 2023 (arXiv 2310.12036), eq. 17, with ``beta`` for tau. As in the paper an answer's
    log-prob is the sum over its tokens, not their mean: the target margin of 1 / (2 beta) nats is
    between whole answers, whatever their lengths.

    Arguments and returns as in `dpo_loss`.
    """
    chosen, rejected = chosen_logratios.float(), rejected_logratios.float()
    loss_sum = (chosen - rejected - 1 / (2 * beta)).square().sum()
    return loss_sum, _implicit_rewards(chosen, rejected, beta)


def kto_loss(
    chosen_logratios: Tensor,
    rejected_logratios: Tensor,
    kl: float,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    present: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Kahneman-Tversky optimization; a pair is one desirable and one undesirable answer.

    Ethayarajh et al. 2024 (arXiv 2402.01306), eq. 7 and 8: the mean over answers of
    ``weight - value``, that is ``w_D * sigmoid(beta * (kl - chosen))`` and
    ``w_U * sigmoid(beta * (rejected - kl))``. A pair's loss is the mean of its two answers'.

    Args:
        chosen_logratios, rejected_logratios: (B,), any float; B may be 0.
        kl: the reference point z_0, KL(policy || reference) in nats per answer, estimated from
            mismatched answers. A negative estimate counts as 0.
        present: (2, B), 0 for a chosen, or a rejected, answer that an unpaired row lacks, whose
            log-ratio is 0. None: 1.

    Returns as in `dpo_loss`.
    """
    kl = max(float(kl), 0.0)
    chosen, rejected = chosen_logratios.float(), rejected_logratios.float()
    desirable = torch.sigmoid(beta * (kl - chosen))
    undesirable = torch.sigmoid(beta * (rejected - kl))
    if present is not None:
        desirable, undesirable = desirable * present[0], undesirable * present[1]
    loss_sum = (desirable_weight * desirable + undesirable_weight * undesirable).sum() / 2
    return loss_sum, _implicit_rewards(chosen, rejected, beta)


def _implicit_rewards(chosen: Tensor, rejected: Tensor, beta: float) -> dict[str, Tensor]:
    """The metrics described in `dpo_loss`."""
    chosen, rejected = beta * chosen.detach(), beta * rejected.detach()
    margin = chosen - rejected
    return {
        "rewards/chosen": chosen.sum(),
        "rewards/rejected": rejected.sum(),
        "rewards/margins": margin.sum(),
        "rewards/accuracies": _num_right(margin),
        "pairs": torch.full_like(margin, 1.0).sum(),
    }


def _num_right(margin: Tensor) -> Tensor:
    """Pairs whose margin is positive; a tie counts half."""
    return (0.5 * (margin > 0) + 0.5 * (margin >= 0)).sum()
