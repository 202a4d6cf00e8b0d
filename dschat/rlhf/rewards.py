"""From the reward model's opinion of an answer to the reward of every action.

Sequences and log-probs come in; scores (S,) and rewards (S, A) go out. It must not know how either
was computed in parallel, nor how they are learned from.
"""

import torch
from torch import Tensor, nn

from dschat.config import RLHFConfig
from dschat.losses import kl_penalty, shape_rewards
from dschat.models.reward import gather_last


@torch.no_grad()
def score_sequences(reward_model: nn.Module, input_ids: Tensor, lengths: Tensor) -> Tensor:
    """The reward model's score at the last real token: EOS, or the last one of a truncated answer.

    ``input_ids`` (B, T) right-padded, ``lengths`` (B,); returns (B,) fp32.
    """
    return gather_last(reward_model(input_ids), lengths)


def token_rewards(
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    answer_mask: Tensor,
    finished: Tensor,
    kl_coef: float,
    config: RLHFConfig,
) -> tuple[Tensor, Tensor]:
    """Rewards (S, A), and the KL estimate (S, A) inside them, both 0 outside ``answer_mask``.

    The score, less ``missing_eos_penalty`` for an unfinished answer, is clipped to +-
    ``clip_reward``.
    """
    kl = kl_penalty(logprobs, ref_logprobs, config.kl_estimator)
    penalised = scores - config.missing_eos_penalty * (~finished).float()
    rewards = shape_rewards(penalised, kl, answer_mask, kl_coef, config.clip_reward)
    return rewards, torch.where(answer_mask, kl, 0.0)
