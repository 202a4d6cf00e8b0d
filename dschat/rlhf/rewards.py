"""The reward model's score, and the names of everything else that scores.

Sequences come in; scores (S,) go out. It must not know how they were computed in parallel, nor how
they are learned from.
"""

import torch
from torch import Tensor, nn

from dschat.models.score_model import gather_last
from dschat.rewards.combine import (
    RunningScale,
    any_applies,
    combine,
    joined_scores,
    source_means,
)
from dschat.rewards.reward_functions import (
    REWARD_MODEL,
    Pending,
    RewardError,
    RewardPrograms,
    SourceScores,
)
from dschat.rewards.samples import Samples

__all__ = [
    "REWARD_MODEL",
    "Pending",
    "RewardError",
    "RewardPrograms",
    "RunningScale",
    "Samples",
    "SourceScores",
    "any_applies",
    "combine",
    "joined_scores",
    "score_sequences",
    "source_means",
]


@torch.no_grad()
def score_sequences(reward_model: nn.Module, input_ids: Tensor, lengths: Tensor) -> Tensor:
    """The reward model's score at the last real token: EOS, or the last one of a truncated answer.

    ``input_ids`` (B, T) right-padded, ``lengths`` (B,); returns (B,) fp32.
    """
    return gather_last(reward_model(input_ids), lengths)
