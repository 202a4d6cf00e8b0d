"""The part of DeepSpeed's engine that dschat uses, as a type.

Only `dschat.runtime` makes engines; a protocol lets every other package name them without importing
DeepSpeed. What belongs to one ZeRO stage's optimizer stays untyped: its attributes differ by stage.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import dschat.distributed as dist


def full_shape(parameter: nn.Parameter) -> torch.Size:
    """Shape of the whole parameter: under ZeRO-3 a rank holds only a shard, and a quantized one
    (`dschat.models.quantized`) is packed.
    """
    sharded = getattr(parameter, "ds_shape", parameter.shape)
    return torch.Size(getattr(parameter, "whole_shape", sharded))


class TrainingEngine(Protocol):
    """A ``deepspeed.DeepSpeedEngine`` around one trained model. Calling it runs the forward
    pass."""

    module: nn.Module
    optimizer: Any  # of the ZeRO stage, around torch's
    lr_scheduler: Any
    param_names: Mapping[nn.Parameter, str]
    config: Mapping[str, Any]
    micro_steps: int
    training: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def train(self, mode: bool = True) -> Any: ...

    def eval(self) -> Any: ...

    def backward(self, loss: Tensor, **options: Any) -> Any: ...

    def step(self) -> None: ...

    def was_step_applied(self) -> bool: ...

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None: ...

    def get_global_grad_norm(self) -> float | Tensor | None: ...

    def get_lr(self) -> Sequence[float]: ...

    def fp16_enabled(self) -> bool: ...

    def zero_optimization(self) -> bool: ...

    def zero_optimization_stage(self) -> int: ...

    def zero_optimization_partition_weights(self) -> bool: ...

    def zero_offload_optimizer(self) -> Any: ...

    def save_checkpoint(self, save_dir: str, tag: str, **options: Any) -> Any: ...

    def load_checkpoint(self, load_dir: str, tag: str, **options: Any) -> Any: ...


# A model to run, in an engine or without one. At run time an engine is an `nn.Module` too.
ModelOrEngine = nn.Module | TrainingEngine


@contextmanager
def attributes_replaced(target: Any, **attributes: Any) -> Iterator[None]:
    """A scope in which ``target`` has these ``attributes``."""
    before = {name: target.__dict__[name] for name in attributes if name in target.__dict__}
    for name, value in attributes.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name in attributes:
            delattr(target, name)
        for name, value in before.items():
            setattr(target, name, value)


# -- eval mode -------------------------------------------------------------------------------------
#
# Evaluation mode as a scope: dropout off inside, each model's own mode restored after it.


def without_adapters(module: Any) -> PreTrainedModel:
    """The transformers model, inside PEFT's wrapper or not."""
    return module.get_base_model() if hasattr(module, "get_base_model") else module


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


# -- copy stream -----------------------------------------------------------------------------------
#
# Copies tensors to the device on a stream of their own, beside computation.
#
# NOTE: what reads the copies calls `wait_for_copies` before: optimizer steps and checkpoints do.

_stream: torch.cuda.Stream | None = None


@contextmanager
def on_copy_stream() -> Iterator[None]:
    """A scope whose work follows what the current stream has queued so far, and runs beside what it
    queues later. Without CUDA, work is done at once.
    """
    global _stream
    if not dist.has_gpu():
        yield
        return
    if _stream is None:
        _stream = torch.cuda.Stream()
    _stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(_stream):
        yield


def wait_for_copies() -> None:
    """Work that the current stream queues from now on follows the copies."""
    if _stream is not None:
        torch.cuda.current_stream().wait_stream(_stream)


def finish_copies() -> None:
    """Wait, on the host, until the copies are done."""
    if _stream is not None:
        _stream.synchronize()
