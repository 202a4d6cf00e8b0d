"""Runs transformers' own module on a device without a wait for it, as a captured step must.

Some of its code reads numbers on the host, or copies one to the device: experts as grouped
products outside of torch's fast ones, rotary scalings that depend on the longest row, constants.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dschat.inference.model.experts import Stack, all_experts, has_grouped_product
from dschat.models.training_engine import attributes_replaced


class DeviceModule:
    """The parts of ``module`` that would wait; call it for a scope in which they do not."""

    def __init__(self, module: nn.Module) -> None:
        self._experts = [m for m in module.modules() if is_experts(m)]
        self._rotary = [m for m in module.modules() if hasattr(m, "rope_type")]
        self._constants = _Constants()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with ExitStack() as scope:
            for experts in self._experts:
                run = partial(_run_experts, experts, experts.forward)
                scope.enter_context(attributes_replaced(experts, forward=run))
            # NOTE: up to `num_positions`, where the engine ends, no row changes the frequencies.
            for rotary in self._rotary:
                kinds = rotary.rope_type
                fixed = dict.fromkeys(kinds, "default") if isinstance(kinds, dict) else "default"
                scope.enter_context(attributes_replaced(rotary, rope_type=fixed))
            scope.enter_context(self._constants)
            yield


def is_experts(module: nn.Module) -> bool:
    """Whether ``module`` has transformers' experts interface."""
    return hasattr(module, "_apply_gate") and hasattr(module, "has_gate")


def is_plain(experts: Any) -> bool:
    """Whether its forward computes no more than the products, of whole experts."""
    # NOTE: transformers 5.17 has neither.
    names = "_is_expert_parallel", "has_post_expert_norm"
    return not any(getattr(experts, name, False) for name in names)


def weights_of(experts: Any) -> list[Tensor]:
    """First and second layer, (N, out, in)."""
    first = experts.gate_up_proj if experts.has_gate else experts.up_proj
    pair = [first.detach(), experts.down_proj.detach()]
    return [w.transpose(1, 2) for w in pair] if experts.is_transposed else pair


def biases_of(experts: Any) -> list[Any]:
    """(N, out) of the first and second layer, or None."""
    if not experts.has_bias:
        return [None, None]
    first = experts.gate_up_proj_bias if experts.has_gate else experts.up_proj_bias
    return [first.detach(), experts.down_proj_bias.detach()]


def _run_experts(
    experts: Any, forward: Callable[..., Any], x: Tensor, chosen: Tensor, shares: Tensor
) -> Any:
    """(T, E), experts and their shares (T, k) -> (T, E)."""
    weights = weights_of(experts)
    rows = x.to(weights[0].dtype)
    if not is_plain(experts) or has_grouped_product(rows):
        return forward(x, chosen, shares)
    pairs = zip(weights, biases_of(experts), strict=True)
    up, down = (Stack(weight, bias, None) for weight, bias in pairs)
    gated = experts._apply_gate if experts.has_gate else experts.act_fn
    return all_experts((up, down), rows, chosen, shares.to(rows.dtype), gated).to(x.dtype)


class _Constants(TorchFunctionMode):
    """Copies a tensor that is made on the host to a device once: in the run before a capture."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[Any, Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and kwargs.get("device") is not None:
            device = kwargs.pop("device")
            func, args, kwargs = Tensor.to, (torch.tensor(*args, **kwargs), device), {}
        if func is not Tensor.to or args[0].device.type != "cpu":
            return func(*args, **kwargs)
        key = args[0].dtype, repr(args[0].tolist()), args[1:], tuple(kwargs.items())
        if key not in self._kept:
            self._kept[key] = func(*args, **kwargs)
        return self._kept[key].clone()  # its reader may write to it
