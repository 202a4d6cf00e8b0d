"""What training does not need while the actor generates: optimizer states, put away in CPU memory.

DeepSpeed engines come in; a scope in which their device memory is smaller goes out. It must not
know who generates.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.runtime.zero.offload_states import (
    offload_optimizer_states,
    reload_optimizer_states,
)

import dschat.distributed as dist
from dschat.models.training_engine import TrainingEngine


@contextmanager
def training_states_away(engines: list[Any], enabled: bool) -> Iterator[None]:
    """A scope in which the optimizer states of ``engines`` lie in pinned CPU memory.

    Adam's moments always; the fp32 master weights under ZeRO 1 and 2 (for ZeRO-3 DeepSpeed 0.19
    moves those with its own FusedAdam only). States that ``--offload`` keeps in CPU memory anyway,
    and everything on a CPU, stay where they are.
    """
    moving = [e for e in engines if enabled and _lies_on_the_device(e)]
    for engine in moving:
        _put_away(engine)
    if moving:
        torch.cuda.empty_cache()
    try:
        yield
    finally:
        for engine in moving:
            _bring_back(engine)


def _lies_on_the_device(engine: TrainingEngine) -> bool:
    return dist.device().type == "cuda" and engine.zero_offload_optimizer() is None


def _has_masters(engine: TrainingEngine) -> bool:
    return engine.zero_optimization_stage() in (1, 2)


def _adam(engine: TrainingEngine) -> torch.optim.Optimizer:
    """torch's optimizer, inside ZeRO's or as it is."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def _put_away(engine: TrainingEngine) -> None:
    if _has_masters(engine):
        engine.offload_states(
            include=[OffloadStateTypeEnum.hp_params], device=OffloadDeviceEnum.cpu
        )
    offload_optimizer_states(_adam(engine), "cpu", pin_memory=True)


def _bring_back(engine: TrainingEngine) -> None:
    if _has_masters(engine):
        engine.reload_states()
    # The copies are done on return: the host buffers may go.
    reload_optimizer_states(_adam(engine), dist.device())
