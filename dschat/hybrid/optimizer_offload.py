"""Moves optimizer states to CPU memory while the actor generates.

They come back on a stream of their own while the answers are scored; the optimizer waits for them.
"""

import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple
from weakref import WeakKeyDictionary, finalize

import torch
from torch import Tensor

import dschat.distributed as dist
from dschat.models.training_engine import (
    TrainingEngine,
    finish_copies,
    on_copy_stream,
    wait_for_copies,
)

# Host memory of each optimizer's states, by name. It is kept: pinning it takes longer than copying.
_buffers: WeakKeyDictionary[torch.optim.Optimizer, dict[str, Tensor]] = WeakKeyDictionary()
_ALIGNMENT = 512  # bytes


@contextmanager
def training_states_away(engines: list[TrainingEngine], enabled: bool) -> Iterator[None]:
    """A scope in which the optimizer states of ``engines`` are in pinned CPU memory.

    Moves Adam's moments, and under ZeRO the fp32 master weights. Does nothing for engines whose
    states ``--offload`` already keeps in CPU memory, nor without a GPU.
    """
    offloaded = [e for e in engines if enabled and is_on_gpu(e)]
    for engine in offloaded:
        _offload(engine)
    try:
        yield
    finally:
        for engine in offloaded:
            _reload(engine)


def is_on_gpu(engine: TrainingEngine) -> bool:
    """Whether the optimizer states of ``engine`` are in device memory."""
    return dist.device().type == "cuda" and engine.zero_offload_optimizer() is None


class State(NamedTuple):
    name: str
    tensor: Tensor
    replace: Callable[[Tensor], None]  # by another tensor


def optimizer_states(engine: TrainingEngine) -> list[State]:
    """This rank's fp32 weights in ZeRO's flat buffers, which ZeRO 0 has not, and Adam's moments.
    Numbers of steps stay where they are.
    """
    found, stage = [], engine.zero_optimization_stage()
    if stage:
        name = "fp32_partitioned_groups_flat" if stage == 3 else "single_partition_of_fp32_groups"
        for number, master in enumerate(getattr(engine.optimizer, name)):
            replace = partial(setattr, master, "data")
            found.append(State(f"master {number}", master.data, replace))
    for number, state in enumerate(_adam(engine).state.values()):
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim():
                found.append(State(f"{key} {number}", value, partial(state.__setitem__, key)))
    return found


def _adam(engine: TrainingEngine) -> torch.optim.Optimizer:
    """torch's optimizer, unwrapped from ZeRO's."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def _buffers_for(engine: TrainingEngine, states: list[State]) -> list[Tensor]:
    """The host memory of ``states``, allocated together where it is new. Steps wait from then on
    for the copies back.
    """
    if _adam(engine) not in _buffers:
        _buffers[_adam(engine)] = {}
        _adam(engine).register_step_pre_hook(lambda *_: wait_for_copies())
    buffers = _buffers[_adam(engine)]
    new = [s for s in states if s.name not in buffers and s.tensor.numel()]
    sizes = [-(-s.tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for s in new]
    parts = _pinned(sum(sizes), _adam(engine)).split(sizes) if new else ()
    for (name, tensor, _), part in zip(new, parts, strict=True):
        flat = part[: tensor.nbytes].view(tensor.dtype)
        buffers[name] = flat.as_strided(tensor.shape, tensor.stride())
    return [buffers.get(s.name, s.tensor) for s in states]


def _pinned(num_bytes: int, owner: object) -> Tensor:
    """Page-locked memory that lives as long as ``owner``. torch rounds its own up to a power of
    two, and never gives it back to the system.
    """
    memory = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
    if dist.has_gpu():
        register = torch.cuda.cudart().cudaHostRegister
        torch.cuda.check_error(register(memory.data_ptr(), num_bytes, 0))
        finalize(owner, _unpin, memory)
    return memory


def _unpin(memory: Tensor) -> None:
    finish_copies()
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


# NOTE: DeepSpeed's own functions pin new memory every time, and move the masters of ZeRO-3 for its
# FusedAdam only. The host waits for no copy. Those to the host are queued on the current stream,
# which orders them with the use of the memory that they free.


@torch.no_grad()
def _offload(engine: TrainingEngine) -> None:
    wait_for_copies()
    if clear_views := getattr(engine.optimizer, "_clear_hp_buffer_references", None):
        clear_views()
    states = optimizer_states(engine)
    for state, buffer in zip(states, _buffers_for(engine, states), strict=True):
        buffer.copy_(state.tensor, non_blocking=True)
        state.replace(buffer)


@torch.no_grad()
def _reload(engine: TrainingEngine) -> None:
    states = optimizer_states(engine)
    tensors = [torch.empty_like(s.tensor, device=dist.device()) for s in states]
    with on_copy_stream():
        for tensor, state in zip(tensors, states, strict=True):
            tensor.copy_(state.tensor, non_blocking=True)
            if tensor.is_cuda:  # else its memory could be reused before, were it dropped
                tensor.record_stream(torch.cuda.current_stream())
            state.replace(tensor)
    if link_views := getattr(engine.optimizer, "_link_all_hp_params", None):
        link_views()
