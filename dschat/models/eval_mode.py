"""Evaluation mode as a scope: dropout off inside, each model's own mode restored after it."""

from collections.abc import Iterator
from contextlib import contextmanager

from dschat.models.training_engine import ModelOrEngine


@contextmanager
def evaluating(*models: ModelOrEngine | None) -> Iterator[None]:
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
