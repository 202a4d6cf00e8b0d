"""Computes the linear layers of training and scoring with oneDNN on CPUs where it is faster.

torch's fp32 `F.linear` and its gradient use MKL. oneDNN runs the three products of a training step
on an AMD EPYC 1.3 to 2.2 times as fast. `use_fastest_products` changes the class of a module's
linear layers in place; parameters and their names stay, so ZeRO, LoRA and gradient checkpointing
work as before.
"""

import logging
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from dschat.config.errors import first_line
from dschat.config.rollout import cuda_kernels
from dschat.models import cpu_matmul
from dschat.models.cpu_matmul import Product, Shape
from dschat.models.long_rows import run_in_pieces, runs_in_pieces
from dschat.models.training_engine import full_shape

logger = logging.getLogger("dschat")

_MAX_SIDE = 1024  # of the weight that is timed; beyond it the ratio of the libraries is constant
_ROWS = 256


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """oneDNN's ``x weight^T + bias``: (..., in), (out, in), (out,) -> (..., out), all fp32."""
    y: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return y


class OneDnnProduct(torch.autograd.Function):
    """`product` with its gradient; ``transposed``: the weight is (in, out)."""

    # NOTE: the parameter itself is saved, not a view of it. Under ZeRO-3 a view would keep the
    # gathered weight in memory until the backward pass.
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.transposed = transposed
        return product(x, weight.t() if transposed else weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        x_grad = weight_grad = None
        if needs_x:
            x_grad = product(rows, weight if ctx.transposed else weight.t()).view(x.shape)
        if needs_weight:
            inputs = x.reshape(-1, x.shape[-1])
            pair = (inputs, rows) if ctx.transposed else (rows, inputs)
            weight_grad = product(pair[0].t(), pair[1].t())
        return x_grad, weight_grad, rows.sum(0) if needs_bias else None, None


def _applies(x: Tensor, weight: Tensor) -> bool:
    is_fp32 = x.dtype == weight.dtype == torch.float32 and x.device.type == "cpu"
    return is_fp32 and x.numel() > 0 and not torch.is_autocast_enabled("cpu")


class OneDnnLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        if not _applies(input, self.weight):
            return super().forward(input)
        y: Tensor = OneDnnProduct.apply(input, self.weight, self.bias, False)
        return y


class OneDnnConv1D(Conv1D):
    """GPT-2's ``Conv1D``, a linear layer with a transposed weight, with oneDNN's product."""

    def forward(self, x: Tensor) -> Tensor:
        if not _applies(x, self.weight):
            return super().forward(x)
        y: Tensor = OneDnnProduct.apply(x, self.weight, self.bias, True)
        return y


def product_of(layer: nn.Linear) -> Callable[..., Tensor]:
    """What computes the products of ``layer``: (x, weight, bias or None) -> x weight^T + bias."""
    is_onednn = isinstance(layer, OneDnnLinear) and layer.weight.dtype == torch.float32
    return product if is_onednn else F.linear


_ONEDNN_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: OneDnnLinear,
    Conv1D: OneDnnConv1D,
}


def use_fastest_products(module: nn.Module) -> None:
    """Change the class of those fp32 linear layers below ``module`` for which oneDNN is faster."""
    if not torch.backends.mkldnn.is_available():
        return
    layers = [m for m in module.modules() if type(m) in _ONEDNN_CLASSES]
    makers: dict[cpu_matmul.Backend, Any] = {
        "plain": lambda shape: _training_product(shape, F.linear),
        "onednn": lambda shape: _training_product(
            shape, lambda x, weight, bias: OneDnnProduct.apply(x, weight, bias, False)
        ),
    }
    shapes = [_timed_shape(layer) for layer in layers]
    choices = cpu_matmul.choose("training", shapes, torch.float32, makers)
    for layer, shape in zip(layers, shapes, strict=True):
        if choices[shape] == "onednn":
            layer.__class__ = _ONEDNN_CLASSES[type(layer)]


def _timed_shape(layer: nn.Linear | Conv1D) -> Shape:
    """(out, in) of what is timed for a layer."""
    rows, columns = (min(size, _MAX_SIDE) for size in full_shape(layer.weight))
    return (rows, columns) if isinstance(layer, nn.Linear) else (columns, rows)


def _training_product(shape: Shape, linear: Any) -> Product:
    """A forward and backward pass of ``linear`` on operands of its own."""
    x, weight, bias, grad = (
        torch.ones(size) for size in ((_ROWS, shape[1]), shape, shape[:1], (_ROWS, shape[0]))
    )
    inputs = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    return lambda: torch.autograd.grad(linear(*inputs), inputs, grad)


# -- liger -----------------------------------------------------------------------------------------
#
# Computes norms and gated MLPs of training and scoring with Liger's Triton kernels on CUDA.
#
# Liger's fused cross entropy stays off: it has no entropies, and its forward waits for a count from
# the device. `dschat.losses.logprobs` keeps no logits either. So do its experts, which
# nobody has measured here.


# Liger's rotary kernel would replace a function of transformers for all models.
_OFF = {"rope": False, "cross_entropy": False, "fused_linear_cross_entropy": False}


def use_liger(model: PreTrainedModel, device: torch.device) -> None:
    """Replace the forward of those norms and MLPs of ``model`` that Liger has, and its gradient, on
    CUDA, where it is installed and DSCHAT_CUDA_KERNELS does not leave it out.

    Parameters and their names stay. A family that Liger lacks, or fails on, stays as it is.
    """
    wanted = device.type == "cuda" and "liger" in cuda_kernels()
    if not wanted or find_spec("liger_kernel") is None:
        return
    from transformers.integrations.liger import apply_liger_kernel

    before, long = _with_own_forward(model), [*filter(runs_in_pieces, model.modules())]
    family = vars(sys.modules[type(model).__module__])
    classes, failed = dict(family), False
    try:
        apply_liger_kernel(model, _OFF)
    # It knows modules of transformers by name, and either may be newer than the other.
    except Exception as error:
        failed = True
        logger.warning("without Liger's kernels, which fail on this model: %s", first_line(error))
    # Liger replaces classes, too: models built later may lie on a CPU, where it has no kernels.
    family.update(classes)
    replaced = _with_own_forward(model) - before
    for module in {m for m in replaced if failed or _holds_experts(m)}:
        del module.forward
        replaced.remove(module)
    for module in long:
        run_in_pieces(module)
    names = sorted({type(m).__name__ for m in replaced})
    logger.info("by Liger's kernels: %s", ", ".join(names) or "none")


def _holds_experts(module: nn.Module) -> bool:
    """Whether its weights are several experts', one behind the other."""
    return any(len(full_shape(p)) == 3 for p in module.parameters(recurse=False))


def _with_own_forward(model: nn.Module) -> set[nn.Module]:
    return {module for module in model.modules() if "forward" in vars(module)}
