"""Recomputes activations in the backward pass, for long rows on one device.

Only the inputs of layers are kept, in host memory if asked. What an MLP keeps for its backward pass
grows with the tokens and is several times as wide as the hidden states, so it runs on pieces of
long streams, each recomputed by itself (ALST, arXiv 2506.13996).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

PIECE = 4096  # tokens

_MLPS = ("mlp", "feed_forward", "ffn")


def recompute_activations(model: PreTrainedModel, on_host: bool = False) -> None:
    """Let ``model`` keep only what its layers read, ``on_host`` in host memory."""
    # renamed in transformers 5.23
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    for name, module in model.named_modules():
        run = getattr(module, "_gradient_checkpointing_func", None)
        if on_host and run is not None:
            module._gradient_checkpointing_func = partial(_with_inputs_on_host, run)
        if name.endswith(_MLPS) and _is_dense(module):
            run_in_pieces(module)


def run_in_pieces(module: nn.Module) -> None:
    """Let ``module`` (tokens, width) run its present forward on pieces of long streams."""
    if not runs_in_pieces(module):
        module.forward = partial(_in_pieces, module.forward)


def runs_in_pieces(module: nn.Module) -> bool:
    return getattr(module.forward, "func", None) is _in_pieces


def _is_dense(module: nn.Module) -> bool:
    """Whether all weights below ``module`` are those of linear layers: tokens are independent."""
    owners = [m for m in module.modules() if next(m.parameters(recurse=False), None) is not None]
    return len(owners) > 1 and all(isinstance(m, nn.Linear) for m in owners)


def _in_pieces(forward: Callable[..., Tensor], *args: Any, **others: Any) -> Tensor:
    if len(args) != 1 or others or args[0].shape[-2] < 2 * PIECE:
        return forward(*args, **others)
    pieces = args[0].split(PIECE, dim=-2)
    if torch.is_grad_enabled():
        outputs = [checkpoint(forward, piece, use_reentrant=False) for piece in pieces]
    else:
        outputs = [forward(piece) for piece in pieces]
    return torch.cat(outputs, dim=-2)


def _with_inputs_on_host(run: Callable[..., Any], *args: Any) -> Any:
    # NOTE: these hooks see what the checkpoint saves; the layer inside has hooks of its own.
    with torch.autograd.graph.saved_tensors_hooks(_to_host, _from_host):
        return run(*args)


def _to_host(saved: Tensor) -> tuple[Tensor | torch.Size, torch.device, torch.dtype]:
    how = saved.device, saved.dtype
    if saved.is_meta:  # in an estimate, which counts what is on the device
        return saved.shape, *how
    if saved.device.type == "cpu":
        return saved, *how
    # The copies are on the stream of the computation, which reads and writes in this order too.
    host = torch.empty(saved.shape, dtype=saved.dtype, pin_memory=True)
    return host.copy_(saved, non_blocking=True), *how


def _from_host(packed: tuple[Tensor | torch.Size, torch.device, torch.dtype]) -> Tensor:
    values, device, dtype = packed
    if isinstance(values, Tensor):
        return values.to(device, non_blocking=True)
    return torch.empty(values, dtype=dtype, device=device)
