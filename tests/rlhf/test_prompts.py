"""Forms in which a caller may give prompts."""

import pytest
import torch

from dschat.config import UserError
from dschat.rlhf.collector import prompt_lists

IDS, MASK = [[7, 7, 5], [8, 9, 7]], [[0, 0, 1], [1, 1, 0]]


@pytest.mark.parametrize("form", [list, torch.tensor, lambda rows: list(map(torch.tensor, rows))])
def test_padding_is_removed(form):
    assert prompt_lists({"input_ids": form(IDS), "attention_mask": form(MASK)}) == [[5], [8, 9]]
    assert prompt_lists({"input_ids": form(IDS)}) == prompt_lists(form(IDS)) == IDS


def test_tuples_are_prompts():
    assert prompt_lists([(5, 6), (7,)]) == [[5, 6], [7]]


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
        prompt_lists(batch)
