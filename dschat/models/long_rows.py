"""Long rows: what a model computes differently once rows are longer than one of its sizes, and
activations that are recomputed in the backward pass.

A row's numbers must depend on the row alone, so they follow from the longest row that a run's flags
allow, never from the rows beside it.

Where layers are recomputed, only their inputs are kept, in host memory if asked. What an MLP keeps
for its backward pass grows with the tokens and is several times as wide as the hidden states, so it
runs on pieces of long streams, each recomputed by itself (ALST, arXiv 2506.13996).
"""

import copy
import logging
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel

logger = logging.getLogger("dschat")

# Config fields for the size of a window, a chunk, a sparse selection or the original positions.
_SIZE = re.compile(
    r"window(_size|_len)?$|chunk_size$|topk$|block_size$|local_attention$|^original_"
)


def probe_length(config: PretrainedConfig, longest_row: int, shortest: int) -> int:
    """Tokens of a row that goes a quarter beyond the largest size that ``longest_row`` exceeds; at
    least ``shortest``, at most ``longest_row``.
    """
    fields = config.get_text_config().to_dict().items()
    sizes = [v for k, v in fields if _SIZE.search(k) and type(v) is int and v < longest_row]
    return max([shortest, *(min(longest_row, size + size // 4 + 4) for size in sizes)])


def fix_rotary(config: PretrainedConfig, longest_row: int) -> None:
    """Give every row the long factors of LongRoPE (arXiv 2402.13753) if one may need them.

    transformers chooses by the longest row of a batch, and while an answer is decoded it keeps the
    keys that it computed with the short ones. The choice by the longest row of a run is vLLM's.
    Dynamic NTK scaling starts beyond ``max_position_embeddings``, where no row goes.
    """
    text = config.get_text_config()
    for settings in _longropes(text):
        original = settings["original_max_position_embeddings"]
        if longest_row > original:
            text.published_rope = vars(text).get(
                "published_rope", copy.deepcopy(text.rope_parameters)
            )
            for long in [key for key in settings if key.startswith("long_")]:
                settings[long.replace("long_", "short_")] = settings[long]
            logger.info(
                "rows of up to %d tokens exceed LongRoPE's original %d positions: every row gets "
                "the long factors; shorter limits would keep the short ones",
                *(longest_row, original),
            )


def num_positions(config: PretrainedConfig) -> int | None:
    """Longest row that a model reads; None: unbounded. Of a model with LongRoPE the longest one
    that has the short factors, unless `fix_rotary` gave every row the long ones.
    """
    text = config.get_text_config()
    originals = [
        settings["original_max_position_embeddings"]
        for settings in _longropes(text)
        if settings["long_factor"] != settings["short_factor"]
    ]
    bounds = [getattr(text, "max_position_embeddings", None), *originals]
    return min((bound for bound in bounds if bound), default=None)


def _longropes(text: PretrainedConfig) -> list[dict[str, Any]]:
    """The settings of LongRoPE: one for all layers, or one per layer type."""
    if hasattr(text, "standardize_rope_params"):
        text.standardize_rope_params()
    rope = getattr(text, "rope_parameters", None) or {}
    return [s for s in (rope, *rope.values()) if isinstance(s, dict) and "long_factor" in s]


def restore_rotary(config: PretrainedConfig) -> None:
    """Undo `fix_rotary`, for the config.json of a trained model."""
    text = config.get_text_config()
    if "published_rope" in vars(text):
        text.rope_parameters = vars(text).pop("published_rope")


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
    """Whether all weights below ``module`` belong to linear layers: tokens are independent."""
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
