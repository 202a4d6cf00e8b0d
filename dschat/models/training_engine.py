"""The part of DeepSpeed's engine that dschat uses, as a type.

Only `dschat.runtime` makes engines; a protocol lets every other package name them without importing
DeepSpeed. What belongs to one ZeRO stage's optimizer stays untyped: its attributes differ by stage.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn


def full_shape(parameter: nn.Parameter) -> torch.Size:
    """Shape of the whole parameter: under ZeRO-3 its ``ds_shape``, as a rank holds only a shard."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


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
