"""Frozen linear layers in 4 or 8 bits (QLoRA): bitsandbytes' layers, loaded by transformers.

Embeddings, heads, norms and adapters stay in the run's dtype. A product is always that of the input
with the dequantized weight, whatever the device and the batch: rollout, scoring and training agree,
and so does the merged model that is saved.

Dettmers et al. 2023, "QLoRA" (arXiv 2305.14314): NF4 with double quantization.
"""

import copy
from importlib.util import find_spec
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

import dschat.distributed as dist
from dschat.config import UserError
from dschat.models.lora import MAMBAS, expert_parameters
from dschat.startup.performance import return_freed_memory


def check_quantizable(model: PreTrainedModel, bits: int) -> None:
    """Raise ``UserError`` unless bitsandbytes is installed and can quantize ``model``'s layers."""
    flag, name = f"--load_in_{bits}bit", type(model).__name__
    if find_spec("bitsandbytes") is None:
        raise UserError(f"{flag}: bitsandbytes is not installed; pip install 'dschat[qlora]'")
    found = {
        "in fused experts": bool(expert_parameters(model)),
        "in Conv1D layers": any(isinstance(module, Conv1D) for module in model.modules()),
        "read by Mamba's kernels": model.config.model_type in MAMBAS,
    }
    for fault in (fault for fault, is_so in found.items() if is_so):
        raise UserError(
            f"{flag}: weights of a {name} are {fault}, which does not go with bitsandbytes; leave "
            "it out, or choose another model"
        )


def loading_options(bits: int, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments for ``from_pretrained``: layers are quantized on the device while they load."""
    settings = BitsAndBytesConfig(
        load_in_4bit=bits == 4,
        load_in_8bit=bits == 8,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return {"quantization_config": settings, "device_map": {"": dist.device()}}


def finish_loading(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Note shape and dtype of the dequantized weights; fix what layers compute and what of them is
    in a state: checkpoints leave frozen weights out, with their scales.
    """
    for layer in model.modules():
        kind = type(layer).__name__
        if kind not in ("Linear4bit", "Linear8bitLt"):
            continue
        layer.weight.whole_shape = torch.Size((layer.out_features, layer.in_features))
        layer.weight.whole_dtype = dtype
        layer._save_to_state_dict = MethodType(nn.Module._save_to_state_dict, layer)
        if kind == "Linear8bitLt":
            layer.forward = MethodType(_weight_only, layer)
        elif layer.weight.device.type == "cpu":
            layer.forward = MethodType(_of_dequantized, layer)
    for parameter in model.parameters():
        if parameter.device.type == "cpu" and not is_quantized(parameter):
            parameter.data = parameter.data.clone()  # of a view all files would stay in memory
    # A save holds dequantized weights, and what reads the configuration must not expect others.
    del model.config.quantization_config
    # Between quantized weights lie the blocks of whole ones, each too small for the next.
    return_freed_memory()


def _weight_only(layer: Any, x: Tensor) -> Tensor:
    """The forward of an 8-bit layer. bitsandbytes' own rounds inputs to 8 bits too, by the largest
    of a batch, except in training on a CPU.
    """
    from bitsandbytes.autograd._functions import MatMul8bitFp

    layer.state.CB, layer.state.SCB = layer.weight.data, layer.weight.SCB
    y: Tensor = MatMul8bitFp.apply(x, layer.weight, None, layer.bias, layer.state)
    return y


def _of_dequantized(layer: Any, x: Tensor) -> Tensor:
    """The forward of a 4-bit layer on a CPU. bitsandbytes' own reads wrong scales there (see
    `dequantized`) and, on some, evaluates in bf16 whatever the dtype.
    """
    y: Tensor = _Product.apply(x, layer.weight)
    return y if layer.bias is None else y + layer.bias


class _Product(torch.autograd.Function):
    """Inputs (..., I) times a frozen 4-bit weight (O, I); the backward pass decodes it again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return F.linear(x, dequantized(weight).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ dequantized(ctx.weight).to(grad.dtype), None


def is_quantized(weight: Tensor) -> bool:
    return hasattr(weight, "whole_dtype")


def whole_dtype(weight: Any) -> torch.dtype:
    """The dtype of `dequantized`."""
    return getattr(weight, "whole_dtype", weight.dtype)


def dequantized(weight: Any) -> Tensor:
    """``weight``; if it is quantized, the values that products read."""
    if not is_quantized(weight):
        return weight
    from bitsandbytes import functional

    if hasattr(weight, "quant_state"):
        state = weight.quant_state
        if weight.device.type == "cpu":
            # NOTE: bitsandbytes 0.50.2 reads wrong scales on processors with AVX-512 where a row is
            # no multiple of a block (of 64 weights); so its rows are blocks.
            state, size = copy.copy(state), weight.whole_shape.numel()
            block = state.blocksize if size % state.blocksize == 0 else size
            state.shape = torch.Size((size // block, block))
        whole = functional.dequantize_4bit(weight.data, state)
        return whole.view(weight.whole_shape).to(weight.whole_dtype)
    return functional.int8_vectorwise_dequant(weight.data, weight.SCB).to(weight.whole_dtype)
