"""Where the reward model's score is read."""

import torch

from dschat.rlhf.rewards import score_sequences


def test_a_sequence_is_scored_at_its_last_token_even_where_the_pad_is_eos():
    ids = torch.tensor([[5, 6, 0, 0, 0], [7, 8, 9, 3, 4], [2, 0, 0, 0, 0]])

    def column_number(input_ids):
        return torch.arange(input_ids.shape[1]).expand_as(input_ids).float()

    scores = score_sequences(column_number, ids, torch.tensor([3, 5, 1]))
    assert scores.tolist() == [2, 4, 0]
