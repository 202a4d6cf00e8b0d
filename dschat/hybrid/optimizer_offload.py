"""Moves optimizer states to CPU memory while the actor generates."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

import dschat.distributed as dist
from dschat.models.training_engine import TrainingEngine


@contextmanager
def training_states_away(engines: list[TrainingEngine], enabled: bool) -> Iterator[None]:
    """A scope in which the optimizer states of ``engines`` are in pinned CPU memory.

    Moves Adam's moments, and under ZeRO 1 and 2 the fp32 master weights (for ZeRO-3, DeepSpeed 0.19
    moves those of its own FusedAdam only). Does nothing for engines whose states ``--offload``
    already keeps in CPU memory, nor without a GPU.
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


def _has_masters(engine: TrainingEngine) -> bool:
    return engine.zero_optimization_stage() in (1, 2)


def _adam(engine: TrainingEngine) -> torch.optim.Optimizer:
    """torch's optimizer, unwrapped from ZeRO's."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


# NOTE: DeepSpeed is imported late. Its import warns unless `dschat.runtime.deepspeed_engine` came
# before.


def _offload(engine: TrainingEngine) -> None:
    from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
    from deepspeed.runtime.zero.offload_states import offload_optimizer_states

    if _has_masters(engine):
        engine.offload_states(
            include=[OffloadStateTypeEnum.hp_params], device=OffloadDeviceEnum.cpu
        )
    offload_optimizer_states(_adam(engine), "cpu", pin_memory=True)


def _reload(engine: TrainingEngine) -> None:
    from deepspeed.runtime.zero.offload_states import reload_optimizer_states

    if _has_masters(engine):
        engine.reload_states()
    # The copies are complete on return, so the host buffers can be freed.
    reload_optimizer_states(_adam(engine), dist.device())
