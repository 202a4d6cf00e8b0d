"""Rewards of every action against NumPy: the score at the end, KL everywhere, the penalty."""

import numpy as np
import pytest
import torch

from dschat.config import RLHFConfig
from dschat.rlhf.rewards import score_sequences, token_rewards


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("penalty", [0.0, 2.5])
def test_rewards(estimator, penalty):
    rng = np.random.default_rng(0)
    lengths = [1, 5, 3, 5]
    logprobs, ref = rng.normal(-2, 1, (2, 4, 5))
    scores, finished = np.array([0.3, -9.0, 7.0, 4.0]), np.array([True, False, True, False])
    mask = np.arange(5) < np.array(lengths)[:, None]
    config = RLHFConfig(clip_reward=5.0, kl_estimator=estimator, missing_eos_penalty=penalty)
    rewards, kl = token_rewards(
        *(torch.tensor(x) for x in (scores, logprobs, ref, mask, finished)), 0.1, config
    )
    d = logprobs - ref
    expected_kl = {"k1": d, "k2": d**2 / 2, "k3": np.exp(-d) - 1 + d}[estimator] * mask
    expected = -0.1 * expected_kl
    for i, n in enumerate(lengths):
        expected[i, n - 1] += np.clip(scores[i] - (0 if finished[i] else penalty), -5, 5)
    np.testing.assert_allclose(kl.numpy(), expected_kl, atol=1e-6)
    np.testing.assert_allclose(rewards.numpy(), expected, atol=1e-5)


def test_a_sequence_is_scored_at_its_last_token_even_where_the_pad_is_eos():
    ids = torch.tensor([[5, 6, 0, 0, 0], [7, 8, 9, 3, 4], [2, 0, 0, 0, 0]])

    def column_number(input_ids):
        return torch.arange(input_ids.shape[1]).expand_as(input_ids).float()

    scores = score_sequences(column_number, ids, torch.tensor([3, 5, 1]))
    assert scores.tolist() == [2, 4, 0]
