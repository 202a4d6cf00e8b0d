"""Token alignment of actions, by hand; assignment of sequences to mini-batches."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dschat.inference.protocol import Rollout
from dschat.rlhf.batching import row_tokens
from dschat.rlhf.experience import from_rollout, joined, mini_batch_of

CPU = torch.device("cpu")
PAD = 0


def small():
    """Prompts of 3, 1, 2 tokens; answers of 2, 4, 1; 0 ends the first and the last and pads too."""
    rollout = Rollout(
        [[14, 0], [22, 23, 24, 25], [0]],
        [[-1.0, -2.0], [-3.0, -4.0, -5.0, -6.0], [-7.0]],
        ["stop", "length", "stop"],
    )
    return from_rollout([[11, 12, 13], [21], [31, 32]], rollout, PAD, first_index=6)


def test_a_rollout_by_hand():
    e = small()
    assert e.input_ids.tolist() == [[11, 12, 13, 14, 0], [21, 22, 23, 24, 25], [31, 32, 0, 0, 0]]
    assert e.lengths.tolist() == [5, 5, 3]
    assert e.prompt_lengths.tolist() == [3, 1, 2]
    assert e.answer_mask.int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]]
    assert e.finished.tolist() == [True, False, True]
    assert e.rollout_logprobs.tolist() == [[-1, -2, 0, 0], [-3, -4, -5, -6], [-7, 0, 0, 0]]
    assert e.numbers.tolist() == [6, 7, 8]
    assert torch.equal(e.loss_mask, e.answer_mask)
    assert torch.equal(e.weights, e.answer_mask.float())


def test_an_episode_by_hand():
    """Two turns with the environment's 91 and 92 between them, and one turn alone."""
    rollout = Rollout(
        [[14, 0, 91, 92, 15, 0], [22, 0]],
        [[-1.0, -2.0, 0.0, 0.0, -3.0, -4.0], [-5.0, -6.0]],
        ["stop", "stop"],
        [[True, True, False, False, True, True], [True, True]],
    )
    e = from_rollout([[11, 12], [21]], rollout, PAD)
    assert e.input_ids.tolist() == [[11, 12, 14, 0, 91, 92, 15, 0], [21, 22, 0, 0, 0, 0, 0, 0]]
    assert e.answer_mask.int().tolist() == [[1, 1, 0, 0, 1, 1], [1, 1, 0, 0, 0, 0]]
    assert e.rollout_logprobs.tolist() == [[-1, -2, 0, 0, -3, -4], [-5, -6, 0, 0, 0, 0]]
    taken = e.take([0, 1], CPU)
    assert taken.rows.targets.tolist() == [14, 0, 15, 0, 22, 0]  # nothing of the environment's
    assert taken.rows.columns.tolist() == [1, 2, 5, 6, 8, 9]
    read = torch.arange(1.0, 7.0)
    assert taken.by_action(read).tolist() == [[1, 2, 0, 0, 3, 4], [5, 6, 0, 0, 0, 0]]
    assert e.pick([1]).answer_mask.shape == (1, 2)
    assert e.pick([0]).answer_mask.shape == (1, 6)


def test_action_j_is_predicted_one_column_before_it():
    e = small().take([0, 1, 2], CPU)
    assert e.rows.input_ids.tolist() == [11, 12, 13, 14, 0, 21, 22, 23, 24, 25, 31, 32, 0]
    assert e.rows.columns.tolist() == [2, 3, 5, 6, 7, 8, 11]
    assert e.rows.targets.tolist() == [14, 0, 22, 23, 24, 25, 0]
    numbers = torch.arange(1.0, 8.0, requires_grad=True)
    by_action = e.by_action(numbers)
    assert by_action.tolist() == [[1, 2, 0, 0], [3, 4, 5, 6], [7, 0, 0, 0]]
    (by_action * by_action.detach()).sum().backward()
    assert numbers.grad.tolist() == numbers.tolist()


def test_a_micro_batch_is_trimmed_to_its_longest():
    part = small().take([0, 2], CPU)
    assert part.input_ids.tolist() == [[11, 12, 13, 14, 0], [31, 32, 0, 0, 0]]
    assert part.answer_mask.int().tolist() == [[1, 1], [1, 0]]
    assert small().take([2], CPU).input_ids.tolist() == [[31, 32, 0]]


def test_no_rows_are_one_dummy_without_actions():
    for e in (small(), from_rollout([], Rollout(), PAD, 4)):
        dummy = e.take([], CPU)
        assert dummy.num_sequences == 1
        assert not dummy.answer_mask.any()
    assert from_rollout([], Rollout(), PAD, 4).num_sequences == 0


def test_rows_of_several_parts_make_one():
    first, second = small(), small().pick([1])
    second.numbers += 10
    whole = joined([first, second.pick([]), second])
    assert whole.num_sequences == 4
    assert whole.numbers.tolist() == [6, 7, 8, 17]
    assert whole.lengths.tolist() == [5, 5, 3, 5]
    assert whole.answer_mask.int().tolist()[3] == [1, 1, 1, 1]
    assert whole.input_ids.tolist()[:3] == first.input_ids.tolist()
    narrow = joined([first.pick([2]), first.pick([1])])
    assert narrow.input_ids.tolist() == [[31, 32, 0, 0, 0], [21, 22, 23, 24, 25]]
    assert narrow.rollout_logprobs.tolist() == [[-7, 0, 0, 0], [-3, -4, -5, -6]]
    assert joined([first.pick([]), first.pick([])]).num_sequences == 0


@settings(max_examples=60, deadline=None)
@given(
    blocks=st.integers(1, 8),
    count=st.integers(1, 6),
    cut=st.integers(0, 48),
    epoch=st.integers(0, 3),
)
def test_mini_batches_do_not_depend_on_the_ranks(blocks, count, cut, epoch):
    total = blocks * count
    cut = min(cut, total)
    seed = [1234, 5, epoch]
    numbers = torch.arange(total)
    whole = mini_batch_of(numbers, count, seed)
    parts = [mini_batch_of(part, count, seed) for part in (numbers[:cut], numbers[cut:])]
    assert np.concatenate(parts).tolist() == whole.tolist()
    assert np.bincount(whole, minlength=count).tolist() == [blocks] * count


def test_epochs_have_different_mini_batches():
    dealt = [mini_batch_of(torch.arange(64), 8, [1, 0, epoch]).tolist() for epoch in range(2)]
    assert dealt[0] != dealt[1]


def test_rows_count_the_tokens_that_they_pack_into():
    e = small()
    twice = joined([e, e])  # every prompt has two answers
    for rows in ([0, 1, 2], [0, 3], [1, 4, 5, 2]):
        prompts = {t.prompt: t.prompt_tokens for t in row_tokens(twice, rows)}
        own = [t.total - t.prompt_tokens for t in row_tokens(twice, rows)]
        assert sum(prompts.values()) + sum(own) == twice.take(rows, CPU).rows.num_tokens


def test_an_experience_prints_in_ten_lines():
    rollout = Rollout([[5, 6], [7], [8, 9]], [[-1.0, -1.0], [-2.0], [-1.0, -1.0]], ["stop"] * 3)
    e = from_rollout([[1, 2], [3], [4]], rollout, 0)
    e.scores[:2] = torch.tensor([0.5, 2.0])
    e.scored[2] = False  # in no mean
    e.logprobs[0] = 0.25
    shown = str(e)
    assert len(shown.splitlines()) <= 10
    assert max(map(len, shown.splitlines())) < 100
    assert shown.splitlines()[0] == "Experience: 3 sequences, steps of an epoch: 1"
    assert "scores        mean      1.25 from       0.5 to         2" in shown
    assert "KL to ref     mean    0.1667 from         0 to       0.5" in shown
    e.problem = "scores not finite"
    assert "scores not finite" in str(e.pick([]))
