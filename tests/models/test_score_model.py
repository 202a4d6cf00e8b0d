"""Where a sequence's score is read."""

import torch

from dschat.models.score_model import gather_last


def test_a_sequence_is_scored_at_its_last_token_by_length():
    """Whatever stands at padding: lengths say where a sequence ends."""
    scores = torch.tensor([[0.1, 0.2, 0.3, 9.0, 9.0], [0.4, 0.5, 0.6, 0.7, 0.8], [0.9, 9, 9, 9, 9]])
    read = gather_last(scores, torch.tensor([3, 5, 1]))
    assert torch.equal(read, torch.tensor([0.3, 0.8, 0.9]))
