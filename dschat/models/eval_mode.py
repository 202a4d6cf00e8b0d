"""Evaluation mode as a scope: dropout off inside, each model's own mode restored after it."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(*models: nn.Module | None) -> Iterator[None]:
    """A scope in which ``models`` are in evaluation mode; None entries are skipped.

    Gradients are not switched off.
    """
    present = [model for model in models if model is not None]
    modes = [model.training for model in present]
    for model in present:
        model.eval()
    try:
        yield
    finally:
        for model, mode in zip(present, modes, strict=True):
            model.train(mode)
