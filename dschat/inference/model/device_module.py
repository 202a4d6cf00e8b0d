"""Runs transformers' own module on a device without a wait for it, as a captured step must, and
by kernels, where they compute the same.

Some of its code reads numbers on the host, or copies one to the device: experts as grouped
products outside of torch's fast ones, rotary scalings that depend on the longest row, constants.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.activations import ACT2FN
from transformers.integrations import moe

from dschat.inference.kernels.cuda import ACTIVATIONS
from dschat.inference.model.borrowed import BorrowedLinear, BorrowedPart
from dschat.inference.model.experts import Stack, all_experts, has_grouped_product
from dschat.inference.model.layers import Norm
from dschat.inference.model.step_kernels import StepKernels
from dschat.models.training_engine import attributes_replaced


class DeviceModule:
    """The parts of ``module`` that would wait or that kernels compute; call it for a scope in which
    they do not wait, and kernels compute them.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._experts = [m for m in module.modules() if is_experts(m)]
        self._linears = [m for m in module.modules() if type(m) is nn.Linear]
        self._rotary = [m for m in module.modules() if hasattr(m, "rope_type")]
        self._constants = Constants()

    @cached_property
    def _norms(self) -> list["RmsNorm"]:
        return rms_norms(self._module)

    @contextmanager
    def __call__(self, kernels: StepKernels | None = None) -> Iterator[None]:
        """``kernels``: of a captured step."""
        with ExitStack() as scope:
            for experts in self._experts:
                run = partial(_run_experts, experts, experts.forward, kernels)
                scope.enter_context(attributes_replaced(experts, forward=run))
            if kernels is not None and kernels.runs("norm"):
                for norm in self._norms:
                    how = Norm(norm.module.weight.detach(), None, norm.offset)
                    kernel = partial(kernels.add_norm, how, added=None, eps=norm.eps)
                    run = partial(norm.run, kernel, norm.module.forward)
                    scope.enter_context(attributes_replaced(norm.module, forward=run))
            if kernels is not None and kernels.runs("product"):
                for linear in self._linears:
                    if "forward" not in linear.__dict__:  # what is not replaced yet
                        bias = None if linear.bias is None else linear.bias.detach()
                        part = BorrowedPart(linear.weight.detach(), bias)
                        run = partial(_run_linear, BorrowedLinear({"": part}), kernels)
                        scope.enter_context(attributes_replaced(linear, forward=run))
            # NOTE: up to `num_positions`, where the engine ends, no row changes the frequencies.
            for rotary in self._rotary:
                kinds = rotary.rope_type
                fixed = dict.fromkeys(kinds, "default") if isinstance(kinds, dict) else "default"
                scope.enter_context(attributes_replaced(rotary, rope_type=fixed))
            scope.enter_context(self._constants)
            yield


def _run_linear(linear: BorrowedLinear, kernels: StepKernels, x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    return kernels.linear(linear, rows).view(*x.shape[:-1], -1)


class RmsNorm(NamedTuple):
    """A module that computes the RMS norm of its last dimension, by its weight + ``offset``."""

    module: Any
    eps: float
    offset: float

    def run(
        self,
        kernel: Callable[[Tensor], Tensor],
        forward: Callable[..., Any],
        x: Tensor,
        *others: Any,
        **named: Any,
    ) -> Any:
        """The module's output by ``kernel``, on contiguous rows; ``forward`` where that is not all
        that it is called for.
        """
        if others or named or torch.is_grad_enabled() or x.dtype != self.module.weight.dtype:
            return forward(x, *others, **named)
        return kernel(x.reshape(-1, x.shape[-1]).contiguous()).view(x.shape)


@torch.no_grad()
def rms_norms(module: nn.Module) -> list[RmsNorm]:
    """The RMS norms of ``module``, found by a trial of each in fp32."""
    found = []
    for norm in module.modules():
        weight = norm._parameters.get("weight")
        eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        if weight is None or weight.dim() != 1 or eps is None or "bias" in norm._parameters:
            continue
        if not weight.numel():
            continue
        twin, scale = copy.copy(norm), weight.float()
        twin._parameters = {**norm._parameters, "weight": nn.Parameter(scale)}
        x = torch.linspace(-2, 3, 3 * len(scale), device=scale.device).view(3, -1)
        x = torch.cat([x, x * eps**0.5])
        unit = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        try:
            for offset in (0.0, 1.0):
                if torch.allclose(twin(x), unit * (scale + offset), rtol=1e-5, atol=1e-6):
                    found.append(RmsNorm(norm, eps, offset))
                    break
        except (AttributeError, TypeError, ValueError, RuntimeError):
            continue  # takes more than x, is a kernel of another device, or tensors are fake
    return found


def is_experts(module: nn.Module) -> bool:
    """Whether ``module`` has transformers' experts interface."""
    return hasattr(module, "_apply_gate") and hasattr(module, "has_gate")


def is_plain(experts: Any) -> bool:
    """Whether its forward computes no more than the products, of whole experts."""
    # NOTE: transformers 5.17 has neither.
    names = "_is_expert_parallel", "has_post_expert_norm"
    return not any(getattr(experts, name, False) for name in names)


def layers_of(experts: Any) -> list[tuple[Tensor, Tensor | None]]:
    """Weight (N, out, in) and bias (N, out) of the first and second layer."""
    names = "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"
    weights = [getattr(experts, name).detach() for name in names]
    weights = [w.transpose(1, 2) for w in weights] if experts.is_transposed else weights
    has_bias = experts.has_bias
    biases = [getattr(experts, f"{name}_bias").detach() if has_bias else None for name in names]
    return [*zip(weights, biases, strict=True)]


def _run_experts(
    experts: Any,
    forward: Callable[..., Any],
    kernels: StepKernels | None,
    x: Tensor,
    chosen: Tensor,
    shares: Tensor,
) -> Any:
    """(T, E), experts and their shares (T, k) -> (T, E)."""
    if not is_plain(experts):
        return forward(x, chosen, shares)
    up, down = (Stack(weight, bias, None) for weight, bias in layers_of(experts))
    rows = x.to(up.weight.dtype)
    activation = _activation(experts) if kernels is not None and x.dim() == 2 else ""
    count = chosen.numel()
    if kernels and activation and kernels.takes_experts((up, down), count, activation):
        return kernels.experts((up, down), rows, chosen, shares, activation).to(x.dtype)
    if has_grouped_product(rows):
        return forward(x, chosen, shares)
    gated = experts._apply_gate if experts.has_gate else experts.act_fn
    return all_experts((up, down), rows, chosen, shares.to(rows.dtype), gated).to(x.dtype)


def _activation(experts: Any) -> str:
    """The name of act in act(gate) * up of their halves; "": they compute something else."""
    if not experts.has_gate or type(experts)._apply_gate is not moe._default_apply_gate:
        return ""
    kind = type(experts.act_fn)
    return next((name for name in ACTIVATIONS if name and type(ACT2FN[name]) is kind), "")


class Constants(TorchFunctionMode):
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
