"""Makes a whole copy of a sharded model: transformers' module, filled from a weight stream."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from dschat.config import UserError
from dschat.memory import free_bytes


def fill(module: nn.Module, stream: Iterable[tuple[str, Tensor]]) -> None:
    """Copy a weight stream into a whole module. Every weight must appear exactly once.

    Raises:
        RuntimeError: a weight is missing, unknown, repeated or of another shape (our invariant).
    """
    targets = module.state_dict(keep_vars=True)
    parameters = {name for name, _ in module.named_parameters()}
    seen: set[str] = set()
    for name, tensor in stream:
        if name not in targets:
            raise RuntimeError(f"the weight stream has {name}, which the module does not have")
        if name in seen:
            raise RuntimeError(f"the weight stream has {name} twice")
        target = targets[name]
        if target.shape != tensor.shape:  # NOTE: copy_ would broadcast
            shapes = f"{tuple(tensor.shape)} instead of {tuple(target.shape)}"
            raise RuntimeError(f"the weight stream has {name} in shape {shapes}")
        target.data.copy_(tensor)
        seen.add(name)
        del tensor  # NOTE: it may keep a whole bucket alive while the next one is gathered
    if parameters - seen:
        raise RuntimeError(f"the weight stream lacks {sorted(parameters - seen)[:3]}")


def empty_copy(config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """An uninitialized module of ``config``; ``UserError`` with its size if it does not fit."""
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config, dtype=dtype)
    needed = sum(p.numel() * p.element_size() for p in skeleton.parameters())
    free = free_bytes(device)
    if needed > 0.9 * free:
        raise UserError(
            f"a whole copy of the actor for generation takes {needed / 2**30:.1f} GiB per process "
            f"and {free / 2**30:.1f} GiB are free; use a smaller --actor_zero_stage or model"
        )
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).requires_grad_(False).eval()
