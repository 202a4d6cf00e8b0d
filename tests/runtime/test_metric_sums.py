"""Metrics of micro-batches: exact sums, and nothing read from the device before the step's end.

Reads are found with tensors on the meta device, which raises at each.
"""

import pytest
import torch
from step_rows import pair_rows, sft_rows

from dschat.config import RewardConfig
from dschat.runtime.optimizer_step import sum_parts
from dschat.supervised.loop import RewardTask, SFTTask
from dschat.supervised.preference import Pairs, PreferenceTask


def test_sums_are_exact_for_every_dtype():
    tenth = torch.tensor(0.1)
    parts = [{"loss": tenth, "tokens": torch.tensor(2**24 + 1)}, {"loss": tenth.double()}]
    parts += [{"loss": torch.tensor(0.3, dtype=torch.float64), "rare": torch.tensor(True)}]
    fp32_tenth = 0.100000001490116119384765625
    expected = {"loss": fp32_tenth + fp32_tenth + 0.3, "tokens": 16777217.0, "rare": 1.0}
    assert sum_parts(parts) == expected
    assert sum_parts([]) == {}


def _score_model(rows):
    return torch.zeros(rows.columns.shape, device=rows.columns.device, requires_grad=True)


def _language_model(rows):
    return _score_model(rows), None


@pytest.mark.parametrize("kind", ["sft", "reward", "dpo", "ipo", "kto"])
def test_supervised_losses_read_nothing_from_the_device(kind):
    if kind == "sft":
        task, model, rows = SFTTask(), _language_model, sft_rows()
    elif kind == "reward":
        task, model, rows = RewardTask(), _score_model, pair_rows()
    else:
        task, model = PreferenceTask(RewardConfig(loss=kind)), _language_model
        rows = Pairs(pair_rows(), max_len=20)
    batch = task.collate([rows[0], rows[1]])
    total, sums = task.loss(model, batch.to("meta"))
    assert {value.device.type for value in (total, *sums.values())} == {"meta"}
    assert not any(value.requires_grad for value in sums.values())
