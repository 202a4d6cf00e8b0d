"""Moves optimizer states to CPU memory while the actor generates."""

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

import dschat.distributed as dist
from dschat.models.training_engine import TrainingEngine

# Host memory of each optimizer's states, by name. It is kept: pinning it takes longer than copying.
_buffers: WeakKeyDictionary[torch.optim.Optimizer, dict[str, Tensor]] = WeakKeyDictionary()


@contextmanager
def training_states_away(engines: list[TrainingEngine], enabled: bool) -> Iterator[None]:
    """A scope in which the optimizer states of ``engines`` are in pinned CPU memory.

    Moves Adam's moments, and under ZeRO the fp32 master weights. Does nothing for engines whose
    states ``--offload`` already keeps in CPU memory, nor without a GPU.
    """
    offloaded = [e for e in engines if enabled and _is_on_gpu(e)]
    for engine in offloaded:
        _offload(engine)
    try:
        yield
    finally:
        for engine in offloaded:
            _reload(engine)


def _is_on_gpu(engine: TrainingEngine) -> bool:
    return dist.device().type == "cuda" and engine.zero_offload_optimizer() is None


def _masters(engine: TrainingEngine) -> list[Tensor]:
    """This rank's fp32 weights in ZeRO's flat buffers; none under ZeRO 0."""
    stage = engine.zero_optimization_stage()
    if stage == 0:
        return []
    name = "fp32_partitioned_groups_flat" if stage == 3 else "single_partition_of_fp32_groups"
    return getattr(engine.optimizer, name)


def _adam(engine: TrainingEngine) -> torch.optim.Optimizer:
    """torch's optimizer, unwrapped from ZeRO's."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def _buffer(engine: TrainingEngine, name: str, like: Tensor) -> Tensor:
    buffers = _buffers.setdefault(_adam(engine), {})
    if name not in buffers:
        pin = torch.cuda.is_available()
        buffers[name] = torch.empty_like(like, device="cpu", pin_memory=pin)
    return buffers[name]


def _moments(engine: TrainingEngine) -> Iterator[tuple[dict[str, Tensor], str, str]]:
    """(state, its key, name) of every moment. Numbers of steps stay where they are."""
    for number, state in enumerate(_adam(engine).state.values()):
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim():
                yield state, key, f"{key} {number}"


# NOTE: DeepSpeed's own functions pin new memory every time, and move the masters of ZeRO-3 for its
# FusedAdam only. All copies are queued on the current stream, which orders them with the use of the
# memory that they free; the host waits for none.


@torch.no_grad()
def _offload(engine: TrainingEngine) -> None:
    zero = engine.optimizer
    if clear_views := getattr(zero, "_clear_hp_buffer_references", None):
        clear_views()
    for number, master in enumerate(_masters(engine)):
        master.data = _buffer(engine, f"master {number}", master).copy_(master, non_blocking=True)
    for state, key, name in _moments(engine):
        state[key] = _buffer(engine, name, state[key]).copy_(state[key], non_blocking=True)


@torch.no_grad()
def _reload(engine: TrainingEngine) -> None:
    for master in _masters(engine):
        master.data = _on_device(master.data)
    for state, key, _ in _moments(engine):
        state[key] = _on_device(state[key])
    if link_views := getattr(engine.optimizer, "_link_all_hp_params", None):
        link_views()


def _on_device(buffer: Tensor) -> Tensor:
    return torch.empty_like(buffer, device=dist.device()).copy_(buffer, non_blocking=True)
