"""A micro-batch moves in one copy, and its tensors are what they were."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from dschat.models.packing import PackedRows, pack, varlen
from dschat.models.packing.varlen import to_device


@dataclass
class Batch:
    rows: PackedRows
    scores: Tensor
    mask: Tensor
    nothing: Tensor | None = None
    name: str = "batch"


def batch():
    rows = pack([[1, 2, 3], [1, 2], [4]], [[0, 1], [], [0]], [1, 1, 0])
    return Batch(rows, torch.rand(3, 5)[:, 1:4], torch.tensor([True, False, True]))


def tensors_of(value):
    found = []
    varlen._mapped(value, found.append)
    return found


@pytest.fixture
def copied(monkeypatch):
    """A batch moved as if to another device, and the one it was."""
    monkeypatch.setattr(varlen, "_is_on", lambda tensor, device: False)
    original = batch()
    return to_device(original, "cpu"), original


def test_all_tensors_are_parts_of_one_copy(copied):
    moved, original = copied
    parts, expected = tensors_of(moved), tensors_of(original)
    assert len(parts) == 7 + 2 + 4 + 2  # rows, table of pieces and of shared prompts, the batch's
    for part, tensor in zip(parts, expected, strict=True):
        assert part.dtype == tensor.dtype
        assert torch.equal(part, tensor)
        assert part.data_ptr() % 16 == 0
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1


def test_the_rest_is_kept(copied):
    moved, original = copied
    assert (moved.nothing, moved.name) == (None, "batch")
    assert moved.rows.segments.groups == original.rows.segments.groups
    assert moved.rows.num_rows == 3


def test_what_is_there_already_is_not_copied():
    original = batch()
    assert to_device(original, torch.device("cpu")) is original
    on_meta = to_device(original, "meta")
    assert to_device(on_meta, "meta") is on_meta
