"""Computes norms and gated MLPs of training and scoring with Liger's Triton kernels on CUDA.

NOTE: off unless DSCHAT_CUDA_KERNELS has "liger", or is 1: not timed on a device yet.
Liger's fused cross entropy stays off: it has no entropies, and its forward waits for a count from
the device. `dschat.losses.linear_logprobs` keeps no logits either.
"""

import logging
from importlib.util import find_spec

import torch
from torch import nn
from transformers import PreTrainedModel

from dschat.config.cuda_kernels import cuda_kernels

logger = logging.getLogger("dschat")

# Liger's rotary kernel would replace a function of transformers for all models.
_OFF = {"rope": False, "cross_entropy": False, "fused_linear_cross_entropy": False}


def use_liger(model: PreTrainedModel, device: torch.device) -> None:
    """Replace the forward of those norms and MLPs of ``model`` that Liger has, and its gradient.

    Parameters and their names stay. A family that Liger lacks stays as it is.

    NOTE: models of the same family that the process builds later get Liger's norms too.
    """
    wanted = device.type == "cuda" and "liger" in cuda_kernels()
    if not wanted or find_spec("liger_kernel") is None:
        return
    from transformers.integrations.liger import apply_liger_kernel

    before = _with_own_forward(model)
    apply_liger_kernel(model, _OFF)
    names = sorted({type(m).__name__ for m in _with_own_forward(model) - before})
    logger.info("by Liger's kernels, not measured on a device yet: %s", ", ".join(names) or "none")


def _with_own_forward(model: nn.Module) -> set[nn.Module]:
    return {module for module in model.modules() if "forward" in vars(module)}
