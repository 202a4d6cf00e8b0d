"""Holds the weights of transformers' own module for the engine, on a CPU in packed copies.

The module's linear layers then run as the engine's packed products, and those that read the same
input (queries, keys and values; gate and up) as one. So do experts, on the rows that chose them.
RMS norms, half a dozen operators there, are a call of our kernel.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dschat.distributed import RankGroup
from dschat.inference.kernels import cpu
from dschat.inference.model.device_module import (
    RmsNorm,
    is_experts,
    is_plain,
    layers_of,
    rms_norms,
)
from dschat.inference.model.experts import by_expert, chosen_experts
from dschat.inference.model.linear import Linear, fastest_backends
from dschat.inference.model.module_decoder import nothing, paged, probe
from dschat.inference.model.spec import ModelSpec
from dschat.models.cpu_matmul import Backend
from dschat.models.linear import OneDnnLinear
from dschat.models.training_engine import attributes_replaced

if TYPE_CHECKING:
    from peft import PeftModel


class ModuleWeights:
    """What an engine asks of weights, for those of ``module``; on a CPU with packed copies of its
    linear layers, as the products of our decoder are.
    """

    def __init__(
        self, module: "PreTrainedModel | PeftModel", spec: ModelSpec, group: RankGroup
    ) -> None:
        self.module, self.num_kv_heads, self.group = module, spec.num_kv_heads, group
        self.version = 0  # changes when tensors are replaced: captured steps hold addresses
        self.loads = 0  # changes with every value that is loaded
        self._addresses: list[int] = []
        self._use = ExitStack()
        weight = next(module.parameters())
        self.device = weight.device
        self._products: list[_Product | _Experts | _Norm] = []
        if self.device.type == "cpu":
            self._products = [*_products(module, weight), *_norms(module)]
        self.refresh()

    def refresh(self) -> None:
        """Take over the module's present values."""
        for product in self._products:
            product.pack()
        self.loads += 1

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Runs the module in eval mode, with the attention of steps and these products."""
        addresses = [parameter.data_ptr() for parameter in self.module.parameters()]
        self.version += addresses != self._addresses
        self._addresses = addresses
        with paged(self.module), ExitStack() as scope:
            for product in self._products:
                for module, run in product.runs:
                    forward = partial(run, module.forward)
                    scope.enter_context(attributes_replaced(module, forward=forward))
            yield

    def use(self) -> None:
        """`in_use` for good."""
        self._use.enter_context(self.in_use())

    def drop(self) -> None:
        pass


# Modules, and what runs for their forward, which is its first argument.
_Runs = Sequence[tuple[Any, Callable[..., Any]]]


class _Product:
    """One packed product for linear ``layers`` that read the same input."""

    def __init__(self, layers: list[nn.Linear], backend: Backend) -> None:
        self._layers, self._sizes = layers, [layer.out_features for layer in layers]
        shape = sum(self._sizes), layers[0].in_features
        weight = layers[0].weight
        self._linear = Linear(shape, False, weight.dtype, weight.device, backend)
        self._input_version = 0  # another one after a change in place
        self._forget()

    @property
    def runs(self) -> _Runs:
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


class _Experts:
    """Packed products for a module of transformers' experts interface, which holds the weights of
    all its experts in two tensors.
    """

    def __init__(self, experts: nn.Module, backends: list[Backend]) -> None:
        self._module: Any = experts
        self._layers = [
            [Linear((w.shape[0], w.shape[1]), False, w.dtype, w.device, backend) for w in weights]
            for (weights, _), backend in zip(layers_of(experts), backends, strict=True)
        ]

    @property
    def runs(self) -> _Runs:
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
        experts = self._module
        if torch.is_grad_enabled() or not is_plain(experts):
            return forward(x, chosen, shares)
        gated = experts._apply_gate if experts.has_gate else experts.act_fn
        ups, downs = self._layers
        return chosen_experts(partial(by_expert, ups, downs, gated), x, chosen, shares.to(x.dtype))


class _Norm:
    """An RMS norm of ``dschat.inference.kernels.cpu``."""

    def __init__(self, norm: RmsNorm, kernels: cpu.Kernels) -> None:
        self._norm, self._kernels = norm, kernels

    @property
    def runs(self) -> _Runs:
        return [(self._norm.module, partial(self._norm.run, self._kernel))]

    def pack(self) -> None:
        weight = self._norm.module.weight.detach()
        self._weight = weight + self._norm.offset if self._norm.offset else weight

    def _kernel(self, rows: Tensor) -> Tensor:
        return self._kernels.add_norm(rows, None, self._weight, None, self._norm.eps)


def _norms(module: nn.Module) -> list[_Norm]:
    """For those norms of ``module`` that the kernel computes."""
    kernels = cpu.load()
    if kernels is None:
        return []
    found = (norm for norm in rms_norms(module) if norm.module.weight.dtype == torch.float32)
    return [_Norm(norm, kernels) for norm in found]


def _products(module: "PreTrainedModel | PeftModel", weight: Tensor) -> list[_Product | _Experts]:
    """Products for all linear layers and experts like ``weight``, where packing is the fastest."""
    kinds = nn.Linear, OneDnnLinear
    layers = [m for m in module.modules() if type(m) in kinds and m.weight.dtype == weight.dtype]
    groups = _readers_of_one_input(module, layers)
    shapes = [(sum(m.out_features for m in group), group[0].in_features) for group in groups]
    backends = fastest_backends(set(shapes), weight.dtype, weight.device)
    products = [
        _Product(group, backends[shape])
        for group, shape in zip(groups, shapes, strict=True)
        if backends[shape] != "plain"
    ]
    return [*products, *_packed_experts(module, weight)]


def _packed_experts(module: "PreTrainedModel | PeftModel", weight: Tensor) -> list[_Experts]:
    # NOTE: adapters of experts' weights (PEFT's target_parameters) act inside of their forward.
    adapted = {getattr(m, "base_layer", None) for m in module.modules()}
    found = [m for m in module.modules() if is_experts(m) and m not in adapted]
    pairs = {m: [w for w, _ in layers_of(m)] for m in found}
    shapes = {
        m: [(w.shape[1], w.shape[2]) for w in pair]
        for m, pair in pairs.items()
        if pair[0].dtype == weight.dtype
    }
    backends = fastest_backends(chain(*shapes.values()), weight.dtype, weight.device)
    ways = {m: [backends[shape] for shape in pair] for m, pair in shapes.items()}
    return [_Experts(m, chosen) for m, chosen in ways.items() if "plain" not in chosen]


def _readers_of_one_input(
    module: "PreTrainedModel | PeftModel", layers: list[nn.Linear]
) -> list[list[nn.Linear]]:
    """All ``layers``, those together that read the same tensor in a forward."""
    readers: dict[tuple[int, int], list[nn.Linear]] = {}
    inputs: list[Tensor] = []  # kept: else another tensor might have the place of one
    grouped: set[nn.Linear] = set()

    def note(layer: nn.Linear, given: tuple[Tensor, ...]) -> None:
        if given and layer not in grouped:
            grouped.add(layer)
            inputs.append(given[0])
            readers.setdefault((id(given[0]), given[0]._version), []).append(layer)

    hooks = [layer.register_forward_pre_hook(note) for layer in layers]
    try:
        probe(module, nothing)
    finally:
        for hook in hooks:
            hook.remove()
    return [*readers.values(), *([layer] for layer in layers if layer not in grouped)]
