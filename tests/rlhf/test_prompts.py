"""Forms in which a caller may give prompts, and a queue of further ones."""

import pytest
import torch

import dschat.distributed as dist
from dschat.config import UserError
from dschat.data.batches import PromptTable
from dschat.rlhf.prompts import PromptQueue, prompt_table

IDS, MASK = [[7, 7, 5], [8, 9, 7]], [[0, 0, 1], [1, 1, 0]]


@pytest.mark.parametrize("form", [list, torch.tensor, lambda rows: list(map(torch.tensor, rows))])
def test_padding_is_removed(form):
    padded = {"input_ids": form(IDS), "attention_mask": form(MASK)}
    assert prompt_table(padded).ids == [[5], [8, 9]]
    assert prompt_table({"input_ids": form(IDS)}).ids == prompt_table(form(IDS)).ids == IDS


def test_tuples_are_prompts():
    assert prompt_table([(5, 6), (7,)]).ids == [[5, 6], [7]]


@pytest.mark.parametrize(
    ("batch", "error"),
    [
        ({"ids": IDS}, "needs input_ids; it has ids"),
        ({"input_ids": [5, 6], "attention_mask": [1, 1]}, "prompt 0 is 5, not a list"),
        ({"input_ids": IDS, "attention_mask": [[1], [1]]}, "attention_mask has another shape"),
        ({"input_ids": IDS, "attention_mask": MASK[:1]}, "attention_mask has another shape"),
        ({"input_ids": IDS, "attention_mask": [[0, 0, 0], [1, 1, 1]]}, "prompt 0 is empty"),
    ],
)
def test_batches_that_are_none(batch, error):
    with pytest.raises(UserError, match=error):
        prompt_table(batch)


def test_exhausted_prompts_are_sampled_again():
    queue = PromptQueue(iter([[[3]], [[4], [5]]]))
    again = PromptTable([[1], [2]])
    rounds = [queue.take(2, again).ids for _ in range(4)]
    assert rounds == [[[3], [4]], [[5], [1]], [[2], [1]], [[2], [1]]]


def test_prompts_exhausted_on_one_rank_are_sampled_again_on_all(monkeypatch):
    theirs = (
        PromptTable([[9]]),
        True,
    )  # what the other rank brings: its own prompt, as it has no more
    monkeypatch.setattr(dist, "gather_objects", lambda mine: [mine, theirs])
    taken = []
    queue = PromptQueue(taken.append(i) or [[i]] for i in range(9))
    rounds = [queue.take(2, PromptTable([[7]])).ids for _ in range(3)]
    assert rounds == [[[0], [9]], [[7], [9]], [[7], [9]]]
    assert taken == [0]
