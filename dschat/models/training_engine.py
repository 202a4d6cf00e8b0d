"""The part of DeepSpeed's engine that dschat uses, as a type.

Only `dschat.runtime` makes engines; a protocol lets every other package name them without importing
DeepSpeed. Its methods, and what belongs to one ZeRO stage's optimizer, stay untyped.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import dschat.distributed as dist


def full_shape(parameter: Tensor) -> torch.Size:
    """Shape of the whole parameter: under ZeRO-3 a rank holds only a shard, and a quantized one
    (`dschat.models.quantized`) is packed.
    """
    sharded = getattr(parameter, "ds_shape", parameter.shape)
    return torch.Size(getattr(parameter, "whole_shape", sharded))


class TrainingEngine(Protocol):
    """A ``deepspeed.DeepSpeedEngine`` around one trained model. Calling it runs the forward pass.
    What it has besides is named as in DeepSpeed.
    """

    module: nn.Module
    optimizer: Any  # of the ZeRO stage, around torch's
    param_names: Mapping[nn.Parameter, str]
    micro_steps: int
    training: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def __getattr__(self, name: str) -> Any: ...


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
