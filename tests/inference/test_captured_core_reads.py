"""What the host waits for: nothing in a decode step, and one read of pinned memory a step."""

import pytest
import torch
from captures import on_graphs, use
from families import PROMPTS
from torch.overrides import TorchFunctionMode

from dschat.inference import SamplingParams
from dschat.inference.captured_core import CapturedCore
from dschat.inference.cuda_graphs import DecodeGraphs

READS = {"tolist", "item", "numpy", "cpu", "cuda", "__array__", "nonzero", "any", "all"}
READS |= {f"__{kind}__" for kind in ("bool", "int", "float", "index", "contains")}
FROM_HOST = {"tensor", "as_tensor", "from_numpy", "pin_memory"}


class Calls(TorchFunctionMode):
    """Lists torch's functions that are called while it is active."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.made.append((function.__name__, args, kwargs))
        return function(*args, **kwargs)


def watched(monkeypatch, owner, name):
    """The calls of torch's functions in a method, all its runs together."""
    calls, method = Calls(), getattr(owner, name)

    def wrapper(*args):
        with calls:
            return method(*args)

    monkeypatch.setattr(owner, name, wrapper)
    return calls.made


KINDS = [
    {},
    {"temperature": 0.0},
    {"top_p": 0.9, "temperature": 0.7, "min_new_tokens": 4},
    {"top_k": 5, "min_p": 0.02, "stop_token_ids": (3, 5)},
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["opt", "bloom", "mistral"])
def test_a_step_neither_reads_nor_copies(name, kind, monkeypatch, module_of, operators_of_torch):
    use(monkeypatch)
    made = on_graphs(module_of(name), page_size=4)
    calls = watched(monkeypatch, DecodeGraphs, "_run")
    made.generate(PROMPTS[1:4], SamplingParams(max_new_tokens=12, **kind))
    assert len(calls) > 20 * made.stats.decode_steps  # it does see the step
    for function, args, kwargs in calls:
        if function in ("any", "all"):  # of a row of tokens, which stays on the device
            assert len(args) == 2
            continue
        assert function not in READS | FROM_HOST
        moves = [x for x in (*args[1:], *kwargs.values()) if isinstance(x, (torch.device, str))]
        assert function != "to" or not moves


def test_the_host_copies_without_waiting_and_reads_its_own_memory(monkeypatch, module_of):
    use(monkeypatch)
    made = on_graphs(module_of("llama"), page_size=4)
    between = watched(monkeypatch, CapturedCore, "_can_proceed")
    steps = watched(monkeypatch, DecodeGraphs, "_run")
    queued = watched(monkeypatch, CapturedCore, "_launch")
    reads = watched(monkeypatch, CapturedCore, "_read")
    made.generate(PROMPTS[1:4], SamplingParams(max_new_tokens=12, stop_token_ids=(3,), seed=2))
    table = made._runner._graphs.state._host_table  # new pages
    assert {name for name, _, _ in between} <= {"__setitem__"}
    assert all(args[0] is table for _, args, _ in between)
    copies = [(args, kwargs) for name, args, kwargs in queued if name == "copy_"]
    own = [x for x in copies if x[1].get("non_blocking")]
    in_steps = sum(name == "copy_" for name, _, _ in steps)
    assert len(copies) - len(own) == in_steps
    state = made._runner._graphs.state
    into = {args[0].untyped_storage().data_ptr() for args, _ in own}
    assert into == {t.untyped_storage().data_ptr() for t in (state._packed, state._host_ring)}
    read = [args[0] for name, args, _ in reads if name == "tolist"]
    assert len(read) == made.stats.decode_steps
    ring = state._host_ring.untyped_storage().data_ptr()
    assert {t.untyped_storage().data_ptr() for t in read} == {ring}
    assert not {name for name, _, _ in reads} & (READS - {"tolist"})
