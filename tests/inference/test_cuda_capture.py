"""Which engines capture their steps, and what a capture that fails is; `test_on_gpu` captures."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from families import empty_engine

from dschat.config import UserError
from dschat.inference import EngineConfig
from dschat.inference.requests import cuda_graphs
from dschat.inference.requests.cuda_graphs import CudaCapture


@pytest.fixture
def record(monkeypatch):
    """``record(*errors)``: a capture raises these in turn, then succeeds. Returns what it did."""
    done, stream = [], SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(cuda_graphs, "capture_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("empty"))

    def prepare(*errors):
        def once(self, step):
            done.append("record")
            if len(errors) >= done.count("record"):
                raise errors[done.count("record") - 1]
            return SimpleNamespace(replay=step)

        monkeypatch.setattr(CudaCapture, "_record", once)
        return done

    return prepare


MEMORY = torch.OutOfMemoryError("CUDA out of memory")


def test_a_capture_without_memory_is_tried_again_after_emptying_the_cache(record):
    done = record(MEMORY)
    assert CudaCapture(required=True)(int) is int
    assert done == ["record", "empty", "record"]


@pytest.mark.parametrize("errors", [[MEMORY, MEMORY], [RuntimeError("not permitted\nmore")]])
def test_graphs_that_were_demanded_fail_with_one_line(errors, record):
    done = record(*errors)
    with pytest.raises(UserError, match="cuda_graphs: a step cannot be captured: ") as error:
        CudaCapture(required=True)(int)
    assert "\n" not in str(error.value)
    assert done.count("record") == len(errors)
    done.clear()
    with pytest.raises(type(errors[-1])):
        CudaCapture(required=False)(int)


def test_who_gets_graphs(module_of):
    for wanted, has_graphs in ((None, True), (True, True), (False, False)):
        assert EngineConfig(cuda_graphs=wanted).captures(on_gpu=True) == has_graphs
    for wanted in (None, False):
        assert not empty_engine(module_of("llama").config, cuda_graphs=wanted).captures
    with pytest.raises(UserError, match="cuda_graphs needs a CUDA device; this one is a cpu"):
        empty_engine(module_of("llama").config, cuda_graphs=True)
