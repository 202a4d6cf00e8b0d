"""Holds the weights of transformers' own module for the engine, on a CPU in packed copies.

In captured steps its code must not wait for the device. Some of it reads numbers on the host, or
copies one to the device: experts, rotary scalings that depend on the longest row, constants.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dschat.distributed import RankGroup
from dschat.inference.kernels import cpu
from dschat.inference.model.linear import fastest_backends
from dschat.inference.model.module_decoder import nothing, paged, probe
from dschat.inference.model.module_parts import (
    Constants,
    PackedExperts,
    PackedProduct,
    RmsNorm,
    experts_by,
    is_experts,
    is_plain,
    layers_of,
    product_by,
    replaced,
    rms_norms,
)
from dschat.inference.model.spec import ModelSpec
from dschat.inference.model.step_kernels import StepKernels
from dschat.models.linear import OneDnnLinear
from dschat.models.training_engine import attributes_replaced

if TYPE_CHECKING:
    from peft import PeftModel


class ModuleWeights:
    """What an engine asks of weights, for those of ``module``."""

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
        self._experts = [m for m in module.modules() if is_experts(m) and is_plain(m)]
        self._packed: list[PackedProduct | PackedExperts] = []
        if self.device.type == "cpu":
            self._packed = [*_products(module, weight), *_packed_experts(module, self._experts)]
        self._linears = [m for m in module.modules() if type(m) is nn.Linear]
        self._rotary = [m for m in module.modules() if hasattr(m, "rope_type")]
        self._constants = Constants()
        self.refresh()

    @cached_property
    def _norms(self) -> list[RmsNorm]:
        return rms_norms(self.module)

    def refresh(self) -> None:
        """Take over the module's present values."""
        for part in self._packed:
            part.pack()
        self.loads += 1

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Runs the module in eval mode, with the attention of steps; on a CPU by packed products
        and kernels.
        """
        addresses = [parameter.data_ptr() for parameter in self.module.parameters()]
        self.version += addresses != self._addresses
        self._addresses = addresses
        runs = [run for part in self._packed for run in part.runs]
        kernels = cpu.load() if self.device.type == "cpu" else None
        if kernels is not None:
            norms = (norm for norm in self._norms if norm.module.weight.dtype == torch.float32)
            runs += [norm.by(kernels) for norm in norms]
        with paged(self.module), replaced(runs):
            yield

    def use(self) -> None:
        """`in_use` for good."""
        self._use.enter_context(self.in_use())

    def drop(self) -> None:
        pass

    @contextmanager
    def without_waits(self, kernels: StepKernels | None = None) -> Iterator[None]:
        """Runs the module without a wait for the device. ``kernels``: of a captured step."""
        runs = [experts_by(kernels, experts) for experts in self._experts]
        if kernels is not None and kernels.runs("norm"):
            runs += [norm.by(kernels) for norm in self._norms]
        if kernels is not None and kernels.runs("product"):
            plain = (m for m in self._linears if "forward" not in m.__dict__)  # not replaced yet
            runs += [product_by(kernels, linear) for linear in plain]
        with replaced(runs), ExitStack() as scope:
            # NOTE: up to `num_positions`, where the engine ends, no row changes the frequencies.
            for rotary in self._rotary:
                kinds = rotary.rope_type
                fixed = dict.fromkeys(kinds, "default") if isinstance(kinds, dict) else "default"
                scope.enter_context(attributes_replaced(rotary, rope_type=fixed))
            scope.enter_context(self._constants)
            yield


def _products(module: "PreTrainedModel | PeftModel", weight: Tensor) -> list[PackedProduct]:
    """Products for all linear layers like ``weight``, where packing is the fastest."""
    kinds = nn.Linear, OneDnnLinear
    layers = [m for m in module.modules() if type(m) in kinds and m.weight.dtype == weight.dtype]
    groups = _readers_of_one_input(module, layers)
    shapes = [(sum(m.out_features for m in group), group[0].in_features) for group in groups]
    backends = fastest_backends(set(shapes), weight.dtype, weight.device)
    return [
        PackedProduct(group, backends[shape])
        for group, shape in zip(groups, shapes, strict=True)
        if backends[shape] != "plain"
    ]


def _packed_experts(module: nn.Module, experts: list[nn.Module]) -> list[PackedExperts]:
    """For the ``experts`` whose products are the fastest packed."""
    # NOTE: adapters of experts' weights (PEFT's target_parameters) act inside of their forward.
    adapted = {getattr(m, "base_layer", None) for m in module.modules()}
    pairs = {m: [w for w, _ in layers_of(m)] for m in experts if m not in adapted}
    found = []
    for m, pair in pairs.items():
        shapes = [(w.shape[1], w.shape[2]) for w in pair]
        backends = fastest_backends(shapes, pair[0].dtype, pair[0].device)
        chosen = [backends[shape] for shape in shapes]
        if "plain" not in chosen:
            found.append(PackedExperts(m, chosen))
    return found


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
