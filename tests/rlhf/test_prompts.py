"""Forms in which a caller may give prompts."""

import pytest
import torch

from dschat.config import UserError
from dschat.rlhf.prompts import prompt_table

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
