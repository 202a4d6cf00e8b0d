"""Counts what torch's operators do."""

import pytest
from torch.utils._python_dispatch import TorchDispatchMode


class Counting(TorchDispatchMode):
    """The sum of ``count(function, args)`` over the operators that run in this scope."""

    def __init__(self, count):
        super().__init__()
        self.count, self.total = count, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.total += self.count(function, args)
        return function(*args, **(kwargs or {}))


@pytest.fixture
def counting():
    return Counting
