"""Finds the parts of transformers' modules that we compute: linear layers, experts and RMS norms.

On a CPU linear layers run as packed products, those that read the same input (queries, keys and
values; gate and up) as one, and so do experts, on the rows that chose them; an RMS norm, half a
dozen operators there, is a call of our kernel. In captured steps Triton's kernels run them, and
experts do not wait: as grouped products outside of torch's fast ones, they would.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.activations import ACT2FN
from transformers.integrations import moe

from dschat.inference.kernels import cpu
from dschat.inference.kernels.cuda import ACTIVATIONS
from dschat.inference.model.borrowed import BorrowedLinear, BorrowedPart
from dschat.inference.model.experts import (
    Stack,
    all_experts,
    by_expert,
    chosen_experts,
    has_grouped_product,
)
from dschat.inference.model.linear import Linear
from dschat.inference.model.step_kernels import StepKernels
from dschat.models.cpu_matmul import Backend
from dschat.models.training_engine import attributes_replaced

# A module, and what runs for its forward, which is its first argument.
Run = tuple[Any, Callable[..., Any]]


@contextmanager
def replaced(runs: Iterable[Run]) -> Iterator[None]:
    """A scope in which modules run as these say."""
    with ExitStack() as scope:
        for module, run in runs:
            forward = partial(run, module.forward)
            scope.enter_context(attributes_replaced(module, forward=forward))
        yield


# -- linear layers ---------------------------------------------------------------------------------


class PackedProduct:
    """One packed product for linear ``layers`` that read the same input."""

    def __init__(self, layers: list[nn.Linear], backend: Backend) -> None:
        self._layers, self._sizes = layers, [layer.out_features for layer in layers]
        shape = sum(self._sizes), layers[0].in_features
        weight = layers[0].weight
        self._linear = Linear(shape, False, weight.dtype, weight.device, backend)
        self._input_version = 0  # another one after a change in place
        self._forget()

    @property
    def runs(self) -> list[Run]:
        return [(layer, partial(self._run, n)) for n, layer in enumerate(self._layers)]

    def pack(self) -> None:
        self._forget()
        weights = [layer.weight.detach() for layer in self._layers]
        self._linear.pack(torch.cat(weights) if len(weights) > 1 else weights[0])
        self._linear.bias = None
        if any(layer.bias is not None for layer in self._layers):
            self._linear.bias = torch.cat(
                [
                    weight.new_zeros(len(weight)) if layer.bias is None else layer.bias.detach()
                    for layer, weight in zip(self._layers, weights, strict=True)
                ]
            )

    def _forget(self) -> None:
        self._input: Tensor | None = None
        self._outputs: tuple[Tensor, ...] = ()

    def _run(self, number: int, forward: Callable[..., Any], x: Tensor, *others: Any) -> Any:
        """A layer's output; ``forward`` where training calls a head for more than its product."""
        if others or torch.is_grad_enabled() or not x.numel():
            return forward(x, *others)
        if x is not self._input or x._version != self._input_version:
            y = self._linear(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)
            self._input, self._input_version = x, x._version
            self._outputs = y.split(self._sizes, -1) if len(self._sizes) > 1 else (y,)
        output = self._outputs[number]
        if number == len(self._sizes) - 1:
            self._forget()
        return output


def product_by(kernels: StepKernels, layer: nn.Linear) -> Run:
    """Few rows by a kernel."""
    bias = None if layer.bias is None else layer.bias.detach()
    linear = BorrowedLinear({"": BorrowedPart(layer.weight.detach(), bias)})

    def run(forward: Callable[..., Any], x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return kernels.linear(linear, rows).view(*x.shape[:-1], -1)

    return layer, run


# -- norms -----------------------------------------------------------------------------------------


class RmsNorm(NamedTuple):
    """A module that computes the RMS norm of its last dimension, by its weight + ``offset``."""

    module: Any
    eps: float
    offset: float

    def by(self, kernels: cpu.Kernels | StepKernels) -> Run:
        """By a kernel, on contiguous rows, where that is all that the module is called for."""
        how = None, self.module.weight.detach(), None, self.eps, self.offset

        def run(forward: Callable[..., Any], x: Tensor, *others: Any, **named: Any) -> Any:
            if others or named or torch.is_grad_enabled() or x.dtype != self.module.weight.dtype:
                return forward(x, *others, **named)
            return kernels.add_norm(x.reshape(-1, x.shape[-1]).contiguous(), *how).view(x.shape)

        return self.module, run


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


# -- experts ---------------------------------------------------------------------------------------


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


class PackedExperts:
    """Packed products for a module of transformers' experts interface, which holds the weights of
    all its experts in two tensors.
    """

    def __init__(self, experts: nn.Module, backends: list[Backend]) -> None:
        self._module: Any = experts
        self._layers = [
            [Linear((w.shape[1], w.shape[2]), False, w.dtype, w.device, backend) for _ in w]
            for (w, _), backend in zip(layers_of(experts), backends, strict=True)
        ]

    @property
    def runs(self) -> list[Run]:
        return [(self._module, self._run)]

    def pack(self) -> None:
        pairs = layers_of(self._module)
        for layers, (weights, biases) in zip(self._layers, pairs, strict=True):
            of_each = [None] * len(layers) if biases is None else biases
            for layer, weight, bias in zip(layers, weights, of_each, strict=True):
                layer.pack(weight)
                layer.bias = bias

    def _run(self, forward: Callable[..., Any], x: Tensor, chosen: Tensor, shares: Tensor) -> Any:
        """(T, E), experts and their shares (T, k) -> (T, E)."""
        if torch.is_grad_enabled():
            return forward(x, chosen, shares)
        ups, downs = self._layers
        run = partial(by_expert, ups, downs, _gated(self._module))
        return chosen_experts(run, x, chosen, shares.to(x.dtype))


def experts_by(kernels: StepKernels | None, experts: Any) -> Run:
    """All experts of a module without a wait, by ``kernels`` where they apply."""

    def run(forward: Callable[..., Any], x: Tensor, chosen: Tensor, shares: Tensor) -> Any:
        up, down = (Stack(weight, bias, None) for weight, bias in layers_of(experts))
        rows = x.to(up.weight.dtype)
        activation = _activation(experts) if kernels is not None and x.dim() == 2 else ""
        count = chosen.numel()
        if kernels and activation and kernels.takes_experts((up, down), count, activation):
            return kernels.experts((up, down), rows, chosen, shares, activation).to(x.dtype)
        if has_grouped_product(rows):
            return forward(x, chosen, shares)
        shares = shares.to(rows.dtype)
        return all_experts((up, down), rows, chosen, shares, _gated(experts)).to(x.dtype)

    return experts, run


def _gated(experts: Any) -> Callable[[Tensor], Tensor]:
    """What is between its products."""
    gated: Callable[[Tensor], Tensor] = experts._apply_gate if experts.has_gate else experts.act_fn
    return gated


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
