"""Gold scores around training: where they are logged, and that two of one model are equal."""

import pytest
import torch

from dschat.builtin.tiny_model import resolve_model
from dschat.config import SFTConfig
from dschat.models.checkpoint import Checkpoint
from dschat.models.tokenizer import load_tokenizer
from dschat.runtime.gold_eval import log_gold


class RowList(list):
    def write(self, step, metrics):
        self.append((step, metrics))


@pytest.fixture(scope="module")
def tiny():
    path = resolve_model("builtin/tiny")
    return Checkpoint(path, "--model").language_model(torch.float32), load_tokenizer(
        path, "--model"
    )


def logged(tiny, data_path):
    model, tokenizer = tiny
    config = SFTConfig(data_path=data_path, max_eval_samples=3)
    rows = RowList()
    for step in (0, 5):
        log_gold(config, model, tokenizer, (tokenizer.eos_token_id,), rows, step)
    return rows


def test_two_evaluations_of_one_model_draw_the_same_answers(tiny):
    (first, before), (last, after) = logged(tiny, ["builtin/chat:0.5"])
    assert (first, last) == (0, 5)
    assert before == after
    assert set(before) == {"eval/gold", "eval/answer_length", "eval/eos_share"}


def test_nothing_is_logged_for_other_data(tiny):
    assert logged(tiny, ["builtin/arithmetic"]) == []
