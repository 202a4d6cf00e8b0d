"""Moves optimizer states to CPU memory while the actor generates.

They come back on a stream of their own while the answers are scored; the optimizer waits for them.
"""

import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakKeyDictionary, WeakSet, finalize

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
_waiting: WeakSet[torch.optim.Optimizer] = WeakSet()  # whose steps wait for the copies back


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


def _buffers_for(engine: TrainingEngine, states: Sequence[tuple[str, Tensor]]) -> list[Tensor]:
    """The host memory of ``states`` (name, tensor), allocated together where it is new."""
    buffers = _buffers.setdefault(_adam(engine), {})
    new = [(name, tensor) for name, tensor in states if name not in buffers and tensor.numel()]
    sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for _, tensor in new]
    parts = _pinned(sum(sizes), _adam(engine)).split(sizes) if new else ()
    for (name, tensor), part in zip(new, parts, strict=True):
        flat = part[: tensor.nbytes].view(tensor.dtype)
        buffers[name] = flat.as_strided(tensor.shape, tensor.stride())
    return [buffers.get(name, tensor) for name, tensor in states]


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


def _moments(engine: TrainingEngine) -> Iterator[tuple[dict[str, Tensor], str, str]]:
    """(state, its key, name) of every moment. Numbers of steps stay where they are."""
    for number, state in enumerate(_adam(engine).state.values()):
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim():
                yield state, key, f"{key} {number}"


# NOTE: DeepSpeed's own functions pin new memory every time, and move the masters of ZeRO-3 for its
# FusedAdam only. The host waits for no copy. Those to the host are queued on the current stream,
# which orders them with the use of the memory that they free.


@torch.no_grad()
def _offload(engine: TrainingEngine) -> None:
    wait_for_copies()
    zero = engine.optimizer
    if clear_views := getattr(zero, "_clear_hp_buffer_references", None):
        clear_views()
    masters, moments = _masters(engine), list(_moments(engine))
    named = [(f"master {number}", master) for number, master in enumerate(masters)]
    named += [(name, state[key]) for state, key, name in moments]
    buffers = _buffers_for(engine, named)
    for (_, tensor), buffer in zip(named, buffers, strict=True):
        buffer.copy_(tensor, non_blocking=True)
    for master, buffer in zip(masters, buffers, strict=False):
        master.data = buffer
    for (state, key, _), buffer in zip(moments, buffers[len(masters) :], strict=True):
        state[key] = buffer


@torch.no_grad()
def _reload(engine: TrainingEngine) -> None:
    masters, moments = _masters(engine), list(_moments(engine))
    buffers = [master.data for master in masters] + [state[key] for state, key, _ in moments]
    tensors = [torch.empty_like(buffer, device=dist.device()) for buffer in buffers]
    _wait_in_steps(engine)
    with on_copy_stream():
        for tensor, buffer in zip(tensors, buffers, strict=True):
            tensor.copy_(buffer, non_blocking=True)
            if tensor.is_cuda:  # else its memory could be reused before, were it dropped
                tensor.record_stream(torch.cuda.current_stream())
    for master, tensor in zip(masters, tensors, strict=False):
        master.data = tensor
    for (state, key, _), tensor in zip(moments, tensors[len(masters) :], strict=True):
        state[key] = tensor
    if link_views := getattr(engine.optimizer, "_link_all_hp_params", None):
        link_views()


def _wait_in_steps(engine: TrainingEngine) -> None:
    """Have the optimizer's steps wait for the copies back."""
    if _adam(engine) not in _waiting:
        _waiting.add(_adam(engine))
        _adam(engine).register_step_pre_hook(lambda *_: wait_for_copies())
