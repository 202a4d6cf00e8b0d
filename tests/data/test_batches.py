"""Optimizer steps over ranks, and collating their rows."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dschat.data.batches import (
    Endless,
    PromptBatches,
    PromptTable,
    StepBatches,
    position_of,
    prompts_of,
    seek,
)
from dschat.data.micro_batches import MicroBatchSize, collate_pairs, collate_sft

ROWS, BUDGET = MicroBatchSize(1), MicroBatchSize(1, tokens=500)


def steps_of_all_ranks(rows, size, world, epoch=0, micro=ROWS, **options):
    """Per step, per rank: its rows."""
    ranks = [
        list(StepBatches(rows, size, micro, rank, world, seed=7, **options).epoch(epoch))
        for rank in range(world)
    ]
    return list(zip(*ranks, strict=True))


@settings(max_examples=150, deadline=None)
@given(
    num_rows=st.integers(0, 40),
    size=st.integers(1, 17),
    world=st.integers(1, 5),
    epoch=st.integers(0, 3),
    drop_last=st.booleans(),
)
def test_a_global_batch_has_the_same_rows_for_any_ranks(num_rows, size, world, epoch, drop_last):
    rows = list(range(num_rows))
    whole = steps_of_all_ranks(rows, size, 1, epoch, drop_last=drop_last)
    parts = steps_of_all_ranks(rows, size, world, epoch, drop_last=drop_last)
    assert len(parts) == len(whole) == len(StepBatches(rows, size, ROWS, 0, 1, 7, True, drop_last))
    for (whole_rank,), ranks in zip(whole, parts, strict=True):
        assert sorted(sum(ranks, [])) == sorted(whole_rank)
        assert max(map(len, ranks)) - min(map(len, ranks)) <= 1
    seen = sorted(row for step in parts for rank in step for row in rank)
    full = num_rows - num_rows % size
    assert len(seen) == (full if drop_last else num_rows)
    assert len(set(seen)) == len(seen)


def test_a_token_budget_balances_ranks_by_tokens_and_keeps_global_batches():
    rng = np.random.default_rng(0)
    rows = [{"input_ids": [i] * int(n)} for i, n in enumerate(rng.integers(1, 90, 64))]
    rows[3]["input_ids"] = [3] * 400
    whole = steps_of_all_ranks(rows, 16, 1)
    loads = []
    for (batch,), ranks in zip(whole, steps_of_all_ranks(rows, 16, 4, micro=BUDGET), strict=True):
        assert sorted(i for row in sum(ranks, []) for i in row["input_ids"][:1]) == sorted(
            row["input_ids"][0] for row in batch
        )
        loads.append([sum(len(row["input_ids"]) for row in rank) for rank in ranks])
    assert sum(max(load) == 400 for load in loads) == 1, "the longest row is alone on its rank"
    assert max(max(load) - min(load) for load in loads if max(load) < 400) < 20


def test_epochs_and_seeds_shuffle_differently_and_repeatably():
    rows = list(range(50))
    orders = {
        (seed, epoch): [r for s in StepBatches(rows, 50, ROWS, 0, 1, seed).epoch(epoch) for r in s]
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    assert len({tuple(order) for order in orders.values()}) == 4
    again = [r for s in StepBatches(rows, 50, ROWS, 0, 1, 1).epoch(1) for r in s]
    assert again == orders[1, 1]


def test_without_shuffling_the_order_stays():
    steps = StepBatches("abcdefg", 3, ROWS, 0, 1, seed=1, shuffle=False)
    assert list(steps.epoch(0)) == [list("abc"), list("def"), ["g"]]


def test_sft_batch_reads_the_column_before_each_target():
    eos = 2
    rows = [
        {"input_ids": [5, 6, 7, eos], "loss_mask": [False, False, True, True]},
        {"input_ids": [5, eos], "loss_mask": [False, True]},  # an answer of one token
        {"input_ids": [eos], "loss_mask": [True]},  # a first token, which nothing predicts
    ]
    batch = collate_sft(rows)
    assert batch.rows.input_ids.tolist() == [5, 6, 7, eos, 5, eos, eos]
    assert batch.rows.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 0]
    assert batch.rows.columns.tolist() == [1, 2, 4]
    assert batch.rows.targets.tolist() == [7, eos, eos]
    assert batch.rows.row_of.tolist() == [0, 0, 1]
    assert batch.num_real == 3


def test_pair_batch_reads_last_tokens_and_shares_prompts():
    rows = [
        {"chosen_ids": [1, 2, 3], "rejected_ids": [1, 9], "prompt_length": 1},
        {"chosen_ids": [4], "rejected_ids": [4, 5, 6, 7], "prompt_length": 1},
    ]
    batch = collate_pairs(rows)
    assert batch.rows.input_ids.tolist() == [1, 2, 3, 9, 4, 4, 5, 6, 7]
    assert batch.rows.position_ids.tolist() == [0, 1, 2, 1, 0, 0, 1, 2, 3]
    assert batch.rows.segments.groups == ((1, (2, 1)), (1, ()), (4, ()))
    # chosen, then rejected
    assert batch.rows.input_ids[batch.rows.columns].tolist() == [3, 4, 9, 7]
    assert batch.num_real == 2


def test_an_empty_micro_batch_is_a_dummy_of_which_nothing_is_read():
    for batch in (collate_sft([]), collate_pairs([])):
        assert batch.num_real == 0
        assert len(batch.rows.input_ids) == 1
        assert len(batch.rows.columns) == len(batch.rows.targets) == 0


def test_batches_move_to_a_device():
    batch = collate_pairs([{"chosen_ids": [1], "rejected_ids": [2]}]).to("meta")
    assert batch.rows.input_ids.device.type == batch.rows.columns.device.type == "meta"
    assert batch.num_real == 1


def test_sources_of_prompts_are_those_of_all_rows_or_none():
    whole, bare = {"prompt": '"a"', "prompt_text": "a", "inputs": "{}"}, {"prompt_ids": [1]}
    one, some = prompts_of([bare | whole]), prompts_of([bare | whole, bare])
    assert (one.sources, one.texts, one.inputs) == (["a"], ["a"], [{}])
    assert (some.sources, some.texts, some.inputs) == (None, None, None)


def test_a_plain_iterator_has_no_position():
    items = iter("abc")
    seek(items, 2)
    seek(None, 2)
    assert (next(items), position_of(items), position_of(None)) == ("a", 0, 0)


def test_rows_of_a_table_come_as_dicts():
    from datasets import Dataset

    table = Dataset.from_dict({"x": np.arange(5).tolist()})
    (batch,) = StepBatches(table, 5, ROWS, 0, 1, 0, False).epoch(0)
    assert batch == [{"x": i} for i in range(5)]


def test_an_endless_iterator_resumes_where_another_stopped():
    rows = [{"n": n} for n in range(10)]
    batches = StepBatches(rows, 3, ROWS, 0, 1, seed=5)
    first = Endless(batches)
    steps = [next(first) for _ in range(11)]
    assert first.position == 11
    assert steps[:4] == list(batches.epoch(0))
    assert steps[4:8] == list(batches.epoch(1))
    for position in (0, 3, 4, 9):
        again = Endless(batches)
        again.position = position
        assert [next(again) for _ in range(11 - position)] == steps[position:]
        assert again.position == 11


def test_endless_prompts_resume_too():
    rows = [{"prompt_ids": [n]} for n in range(7)]
    expected = PromptBatches(rows, 2, 0, 1, seed=1)
    passes = [list(prompts) for _ in range(3) for prompts in expected]
    ours = Endless(PromptBatches(rows, 2, 0, 1, seed=1))
    assert [list(next(ours)) for _ in range(9)] == passes
    ours.position = 4
    assert [list(next(ours)) for _ in range(5)] == passes[4:]


def test_a_rollout_that_is_not_full_is_dropped_unless_it_is_the_only_one():
    rows = [{"prompt_ids": [n]} for n in range(7)]
    assert [len(prompts) for prompts in PromptBatches(rows, 3, 0, 1, seed=1)] == [3, 3]
    assert [len(prompts) for prompts in PromptBatches(rows, 9, 0, 1, seed=1)] == [7]


def test_prompts_of_tables_of_which_one_lacks_a_part():
    """The other's is not that of all prompts then."""
    whole = PromptTable([[1], [2]], ["a", "b"], ["A", "B"], {"x": [1, 2], "y": [3, 4]}, [{}, {}])
    bare = PromptTable([[3]], None, None, {"x": [5]}, None)
    for first, second, xs in ((whole, bare, [1, 2, 5]), (bare, whole, [5, 1, 2])):
        table = first.concat(second)
        assert table.ids == first.ids + second.ids
        assert (table.sources, table.texts, table.inputs) == (None, None, None)
        assert table.columns == {"x": xs}
    assert whole.concat(whole).sources == ["a", "b", "a", "b"]
    assert whole.concat(PromptTable()) is whole
    assert PromptTable().concat(bare) is bare
    assert vars(whole.pick([1])) == vars(
        PromptTable([[2]], ["b"], ["B"], {"x": [2], "y": [4]}, [{}])
    )
    assert vars(bare.pick([0])) == vars(bare)
