"""The evaluation scope restores what it changed, after an error too."""

import pytest
import torch

from dschat.models.training_engine import evaluating


@pytest.mark.parametrize("training", [True, False])
def test_modes_are_restored_after_an_error(training):
    models = [torch.nn.Linear(1, 1).train(training), None, torch.nn.Dropout(0.5)]

    def fails():
        with evaluating(*models):
            raise RuntimeError(f"training: {models[0].training}, {models[2].training}")

    with pytest.raises(RuntimeError, match="training: False, False"):
        fails()
    assert (models[0].training, models[2].training) == (training, True)
