"""Cutting a rank's rows into micro-batches."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dschat.data.micro_batches import (
    MicroBatchSize,
    RowTokens,
    collate_pairs,
    collate_sft,
    row_tokens,
    shares_of_ranks,
    spread,
)


def answer(prompt, prompt_tokens, own):
    total = prompt_tokens + own
    return RowTokens(total, total, 1, prompt, prompt_tokens)


def tokens_of(rows):
    """Packed: every prompt once."""
    prompts = {row.prompt: row.prompt_tokens for row in rows}
    return sum(prompts.values()) + sum(row.total - row.prompt_tokens for row in rows)


LENGTHS = {"a": 9, "b": 1, "c": 30}
answers = st.lists(
    st.builds(
        lambda p, own: answer(p.encode(), LENGTHS[p], own),
        st.sampled_from("abc"),
        st.integers(1, 20),
    )
)


@settings(deadline=None)
@given(rows=answers, budget=st.integers(50, 200), padded=st.booleans())
def test_every_row_is_in_one_micro_batch_within_the_budget(rows, budget, padded):
    parts = MicroBatchSize(1, budget, padded).split(rows)
    assert sorted(sum(parts, [])) == list(range(len(rows)))
    for part in ([rows[i] for i in part] for part in parts):
        if padded:
            assert len(part) * max((row.longest for row in part), default=0) <= budget
        else:
            assert tokens_of(part) <= budget


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 12), st.integers(1, 5))
def test_without_a_budget_rows_are_cut_in_their_order(num_rows, size):
    parts = MicroBatchSize(size).split([answer(None, 0, 3)] * num_rows)
    assert sum(parts, []) == list(range(num_rows))
    assert all(len(part) == size for part in parts[:-1])
    assert len(parts) == max(1, -(-num_rows // size))


@pytest.mark.parametrize(
    ("size", "totals", "parts"),
    [
        (MicroBatchSize(2, padded=True), (3, 9, 4, 8, 1), [[1, 3], [0, 2], [4]]),  # like lengths
        (MicroBatchSize(1, 100, padded=True), (2, 50, 2, 49, 2), [[1, 3], [0, 2, 4]]),
        # as few as possible, evenly filled
        (MicroBatchSize(1, 100), (50, 40, 30, 30, 30, 20), [[0, 3, 5], [1, 2, 4]]),
        # a row above the budget is alone, and leaves the others together
        (MicroBatchSize(1, 10), (3, 25, 4, 3), [[1], [0, 2, 3]]),
        (MicroBatchSize(1, 100, padded=True), (5, 300, 5), [[1], [0, 2]]),
    ],
)
def test_micro_batches_by_hand(size, totals, parts):
    assert size.split([answer(None, 0, total) for total in totals]) == parts


def test_other_ranks_decide_how_many_micro_batches_there_are(monkeypatch):
    monkeypatch.setattr("dschat.distributed.max_int", lambda value: 3)
    assert MicroBatchSize(2).split([answer(None, 0, 1)] * 3) == [[0, 1], [2], []]
    assert MicroBatchSize(1, 100).split([answer(None, 0, 9)] * 3) == [[0, 1, 2], [], []]


def test_answers_to_one_prompt_stay_together():
    """Apart, each prompt would stand in every micro-batch."""
    rows = [answer(prompt, 60, 10) for _ in range(4) for prompt in (b"x", b"y", b"z")]
    parts = MicroBatchSize(1, 100).split(rows)
    assert len(parts) == 3
    assert all(len({rows[i].prompt for i in part}) == 1 for part in parts)


def test_a_prompt_with_too_many_answers_is_divided_evenly():
    rows = [answer(b"x", 40, 10) for _ in range(9)]
    parts = MicroBatchSize(1, 100).split(rows)  # six answers fit beside the prompt
    assert sorted(map(len, parts)) == [4, 5]


def test_a_layer_that_reads_rows_reads_a_prompt_with_each_of_them():
    rows = [answer(prompt, 40, 10) for _ in range(3) for prompt in (b"x", b"y")]
    rows.append(row_tokens({"chosen_ids": [1] * 50, "other_ids": [], "prompt_length": 40}))
    parts = MicroBatchSize(1, 150, by_row=True).split(rows)
    assert sorted(parts) == [[0, 2, 4], [1, 3, 5], [6]]
    assert len(MicroBatchSize(1, 150).split(rows)) == 2
    pair = row_tokens({"chosen_ids": [1] * 50, "rejected_ids": [1] * 60, "prompt_length": 40})
    assert pair.total == 70
    assert len(MicroBatchSize(1, 120, by_row=True).split([pair, pair])) == 2


def test_ranks_take_equal_tokens_and_whole_prompts():
    """Three prompts of 4 answers, 100 tokens each, and three single answers."""
    rows = [answer(prompt, 60, 10) for _ in range(4) for prompt in (b"x", b"y", b"z")]
    rows += [answer(None, 0, n) for n in (150, 100, 50)]
    parts = shares_of_ranks(rows, 100, 3)
    assert sorted(i for part in parts for i in part) == list(range(15))
    # 600 tokens, if no prompt stands on two ranks.
    assert [tokens_of([rows[i] for i in part]) for part in parts] == [200, 200, 200]
    assert shares_of_ranks([], 100, 2) == [[], []]
    # A prompt beyond the budget is divided; its tokens then count twice.
    shares = shares_of_ranks([answer(b"x", 40, 10) for _ in range(8)], 80, 2)
    assert [len(part) for part in shares] == [4, 4]


def test_rows_count_as_many_tokens_as_they_are_packed_into():
    rng = np.random.default_rng(1)
    for _ in range(20):
        prompt, chosen, rejected = (rng.integers(0, 9, n).tolist() for n in rng.integers(1, 9, 3))
        sft = {"input_ids": prompt + chosen, "loss_mask": [True] * len(prompt + chosen)}
        assert row_tokens(sft).total == collate_sft([sft]).rows.num_tokens
        pair = {"chosen_ids": prompt + chosen, "rejected_ids": prompt + rejected}
        pair["prompt_length"] = len(prompt)
        assert row_tokens(pair).total == collate_pairs([pair]).rows.num_tokens
        assert row_tokens(pair).num_sequences * row_tokens(pair).longest == (
            collate_pairs([pair]).rows.padded_ids.numel()
        )


@pytest.mark.parametrize("count", [1, 3, 7])
def test_sums_differ_by_less_than_the_largest_size(count):
    sizes = np.random.default_rng(2).integers(1, 50, 40).tolist()
    sums = [sum(sizes[i] for i in part) for part in spread(sizes, count)]
    assert sum(sums) == sum(sizes)
    assert sums == sorted(sums, reverse=True)
    assert sums[0] - sums[-1] < max(sizes)


@pytest.mark.parametrize("size", [600, 400, 260])
def test_thousands_of_large_rows_are_cut_at_once(size, monkeypatch):
    """Where the sum of the rows says little about the number of micro-batches."""
    tried = []
    monkeypatch.setattr(
        "dschat.data.micro_batches.spread",
        lambda sizes, n: tried.append(len(sizes)) or spread(sizes, n),
    )
    parts = MicroBatchSize(1, 1000).split([answer(None, 0, size)] * 4000)
    assert len(parts) == -(-4000 // (1000 // size))
    assert sum(n > 1 for n in tried) < 10
