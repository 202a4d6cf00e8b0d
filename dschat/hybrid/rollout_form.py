"""Provides a generator with the current weights of the module that DeepSpeed trains.

Two forms: the inference engine, which copies the weights from ZeRO's shards once per version or
reads the training module's own tensors; and the Hugging Face module, for families that the engine
does not know.
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

import dschat.distributed as dist
from dschat.config import UserError
from dschat.hybrid import RolloutChoice, rollout_choice, runs_module
from dschat.hybrid.weight_stream import (
    Buckets,
    empty_copy,
    factor_stream,
    fill,
    module_shards,
    place_adjacent,
    weight_stream,
)
from dschat.inference import EngineConfig, InferenceEngine, UnsupportedModel, model_spec
from dschat.inference.generators.hf_generator import HuggingFaceGenerator, module_generator
from dschat.inference.model.spec import check_shares
from dschat.inference.protocol import Generator
from dschat.inference.requests.stats import DeviceSpan
from dschat.models.checkpoint_tensors import normalized_names
from dschat.models.lora import adapters, unwrapped_name
from dschat.models.quantized import is_quantized

logger = logging.getLogger("dschat")

T = TypeVar("T")


@dataclass(frozen=True)
class RolloutSettings:
    """How the actor generates. ``auto``: see `dschat.hybrid`."""

    dtype: torch.dtype
    engine: EngineConfig
    tp_size: int = 1
    temperature: float = 1.0  # of the answers whose log-probs training reads
    layout: Literal["auto", "copy", "zero_copy"] = "auto"
    lora: Literal["auto", "merge", "side"] = "auto"
    frozen_base: bool = False  # only adapters are trained
    sharded: bool = False  # ZeRO-3
    layers_per_bucket: int = 8
    release_cache: bool = False  # free the KV cache after every rollout
    release_weights: bool = False  # free the rollout's weights after every rollout


@dataclass
class Refresh(Buckets):
    """Cost of the last refresh of the rollout weights, on this rank."""

    span: DeviceSpan | None = None  # None: nothing was refreshed

    @property
    def seconds(self) -> float:
        """Seconds on the device; waits for it."""
        return self.span.seconds() if self.span is not None else 0.0


class RolloutForm(Protocol):
    """An actor that can generate."""

    last_refresh: Refresh

    def enter(self, version: int) -> Generator:
        """Collective. A generator with the weights of optimizer step ``version``."""
        ...

    def leave(self) -> None:
        """End the rollout; frees cache and weights if so configured."""
        ...

    def filled_from(self, stream: Iterable[tuple[str, Tensor]]) -> Generator:
        """Collective. A separate generator with other weights (the moving average's)."""
        ...

    def describe(self) -> str:
        """One line: back end, dtype, sizes."""
        ...


def check_tensor_parallel(config: PretrainedConfig, tp_size: int, backend: str = "engine") -> None:
    """Raise ``UserError`` if ``tp_size`` processes cannot share a rollout of this model.

    Needs only the config: call it before any weight loads.
    """
    if tp_size == 1:
        return
    flag = f"--inference_tp_size {tp_size}"
    if dist.world_size() % tp_size:
        raise UserError(
            f"{flag} does not divide the {dist.world_size()} processes; choose a divisor, or start "
            "more of them (train.py --num-gpus)"
        )
    if backend == "vllm":  # which says itself what it cannot divide
        return
    try:
        check_shares(model_spec(config), tp_size)
    except UnsupportedModel as reason:
        raise UserError(f"{flag}: {reason}") from None


def rollout_form(
    module: nn.Module, config: PretrainedConfig, settings: RolloutSettings, enabled: bool
) -> RolloutForm:
    """Collective. The inference engine if ``enabled`` and it knows the family, else the module.

    ``settings.tp_size`` is above 1 where `check_tensor_parallel` allows it and ``enabled`` alone.

    Raises:
        UserError: the layout is not possible.
    """
    if not enabled:
        return ModuleRollout(module, config, settings)
    quantized = any(map(is_quantized, module.parameters()))
    if not runs_module(quantized, settings.layout, settings.lora, settings.tp_size):
        try:
            return EngineRollout(module, config, settings)
        except UnsupportedModel as reason:
            logger.info("rollouts by transformers' module: %s", reason)
    return ModuleRollout(module, config, settings, in_engine=True)


class EngineRollout:
    """Rollouts with the inference engine."""

    def __init__(
        self, module: nn.Module, config: PretrainedConfig, settings: RolloutSettings
    ) -> None:
        self._module, self._config, self._settings = module, config, settings
        self._group = dist.RankGroup(settings.tp_size)
        self._engine = self._make_engine()
        self._has_adapters = bool(adapters(module))
        choice = self._choice()
        self._layout, self._lora = choice.layout, choice.lora
        if self._layout == "zero_copy" and self._has_adapters:
            parameters = self._by_engine_name(module.named_parameters())
            place_adjacent(parameters, self._engine.weights.fused_names())
        self._tables = [t for m in module.modules() for t in (m._parameters, m._buffers) if t]
        self._addresses: list[int] = []  # of the tensors in them, when the engine borrowed those
        self._version: int | None = None  # of the weights in the engine
        self._base_loaded = False
        self.last_refresh = Refresh()
        if not settings.release_cache:
            self._engine.allocate_cache()  # before training's activations divide the free memory

    def _make_engine(self) -> InferenceEngine:
        s = self._settings
        return InferenceEngine(self._config, s.dtype, dist.device(), s.engine, self._group)

    def _choice(self) -> RolloutChoice:
        s, device = self._settings, dist.device()
        borrowed = [t for t in module_shards(self._module) if unwrapped_name(t.name) is not None]
        readable = s.tp_size == 1 and all(
            t.is_whole and t.tensor.device.type == device.type and t.tensor.dtype == s.dtype
            for t in borrowed
            if t.dtype.is_floating_point
        )
        return rollout_choice(
            s.layout,
            s.lora,
            has_adapters=self._has_adapters,
            frozen_base=s.frozen_base,
            sharded=s.sharded,
            readable=readable,
            on_cpu=device.type == "cpu",
        )

    def describe(self) -> str:
        e, s = self._engine, self._settings
        weights = "training's own weights" if self._layout == "zero_copy" else "its own copy"
        pages = "whole sequences" if e.page_size == e.max_seq_len else f"{e.page_size} tokens"
        products = "/".join(sorted({*e.weights.backends.values()}))
        return (
            f"inference engine on {weights} ({products} products), "
            f"{str(s.dtype).removeprefix('torch.')}, TP {s.tp_size}, sdpa attention, up to "
            f"{e.max_num_seqs} sequences of {e.max_seq_len}, pages of {pages}"
            + (f", LoRA {self._lora}" if self._has_adapters else "")
            + (", CUDA graphs" if e.captures else "")
        )

    # -- the scope of a rollout --------------------------------------------------------------------

    def enter(self, version: int) -> InferenceEngine:
        """Collective. The engine, refreshed if its weights are of another version."""
        self.last_refresh = Refresh()
        # Also without a step: a resumed run, which has no cached prefixes, computes the same.
        self._engine.forget_prefixes()
        # NOTE: addresses change without a step, too: a checkpoint was loaded, states were moved.
        moved = self._layout == "zero_copy" and self._borrow()
        if self._version != version or moved:
            span = DeviceSpan(dist.device())
            self.last_refresh = Refresh(max_layers=self._settings.layers_per_bucket, span=span)
            self._refresh(self.last_refresh)
            self._version = version
            span.stop()
        return self._engine

    def leave(self) -> None:
        if self._settings.release_cache:
            self._engine.release_cache()
        if self._settings.release_weights and self._layout == "copy":
            self._engine.release_weights()
            self._version, self._base_loaded = None, False

    @torch.no_grad()
    def _refresh(self, buckets: Buckets) -> None:
        """Collective. Update the engine's weights."""
        device, weights = dist.device(), self._engine.weights
        if self._layout == "copy" and (self._lora == "merge" or not self._base_loaded):
            merged = self._lora == "merge"
            weights.load(self._known(weight_stream(self._module, device, None, buckets, merged)))
            self._base_loaded = True
        if self._has_adapters and self._lora == "side":
            weights.load_adapters(factor_stream(self._module, device, buckets))

    def _borrow(self) -> bool:
        """Have the engine read the training module's tensors. Returns whether one had moved."""
        held = (t for table in self._tables for t in table.values() if t is not None)
        addresses = [getattr(t, "ds_tensor", t).data_ptr() for t in held]
        if addresses == self._addresses:
            return False
        shards = self._by_engine_name((s.name, s) for s in module_shards(self._module))
        self._addresses = addresses
        return self._engine.borrow_weights({name: s.whole() for name, s in shards.items()})

    def _by_engine_name(self, named: Iterable[tuple[str, T]]) -> dict[str, T]:
        """What belongs to weights of the engine; adapters and constant buffers are left out."""
        plain = ((unwrapped_name(name), x) for name, x in named)
        return dict(self._known((name, x) for name, x in plain if name is not None))

    def _known(self, stream: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
        """The stream under the engine's names, without constant buffers."""
        engine_name = normalized_names(self._engine.weights.names, self._engine.spec.prefix)
        for name, tensor in stream:
            target = engine_name(name)
            if target is not None:
                yield target, tensor
            del tensor  # NOTE: see `weight_stream`

    def filled_from(self, stream: Iterable[tuple[str, Tensor]]) -> InferenceEngine:
        """Collective. A second engine with these weights; this one's cache is freed for it."""
        self._engine.release_cache()
        engine = self._make_engine()
        engine.weights.load(self._known(stream))
        return engine


@dataclass
class ModuleRollout:
    """Rollouts with the Hugging Face module: the one in training, or a whole copy under ZeRO-3.

    ``in_engine``: as the inference engine's decoder, where it can be.
    """

    module: nn.Module
    config: PretrainedConfig
    settings: RolloutSettings
    in_engine: bool = False
    last_refresh: Refresh = field(default_factory=Refresh)
    _copy: nn.Module | None = None
    _made: InferenceEngine | HuggingFaceGenerator | None = None
    _version: int | None = None  # of their weights
    _is_checked: bool = False
    _scope: ExitStack = field(default_factory=ExitStack)

    def describe(self) -> str:
        weights = "a whole copy" if self.settings.sharded else "training's own weights"
        how = "inference engine" if self.in_engine else "transformers' generate"
        return f"{how} with the Hugging Face module on {weights}"

    def enter(self, version: int) -> Generator:
        """Collective. A generator on the module, or on its copy with this version's weights."""
        self.last_refresh = Refresh()
        is_stale = version != self._version
        module = self._whole_copy(is_stale) if self.settings.sharded else self.module
        self._version = version
        if self._made is None:
            self._made = self._generator_on(module)
        elif is_stale and self._engine is not None:
            self._engine.weights.refresh()
        if self._engine is not None:
            self._engine.forget_prefixes()
            self._scope.enter_context(self._engine.weights.in_use())
        return self._made

    def leave(self) -> None:
        self._scope.close()
        if self.settings.release_cache and self._engine is not None:
            self._engine.release_cache()
        if self.settings.release_weights and self._copy is not None:
            self._copy = self._version = self._made = None

    @property
    def _engine(self) -> InferenceEngine | None:
        return self._made if isinstance(self._made, InferenceEngine) else None

    def filled_from(self, stream: Iterable[tuple[str, Tensor]]) -> Generator:
        """Collective. A generator on a new copy with these weights."""
        copy = self._empty_copy()
        fill(copy, stream)
        made = self._generator_on(copy)
        if isinstance(made, InferenceEngine):
            made.weights.use()
        return made

    def _whole_copy(self, is_stale: bool) -> nn.Module:
        """Collective. The copy; with the present weights, if it ``is_stale``."""
        span = DeviceSpan(dist.device())
        if self._copy is None:
            self._copy = self._empty_copy()
        if is_stale:
            self.last_refresh = Refresh(span=span)
            fill(self._copy, weight_stream(self.module, dist.device(), None, self.last_refresh))
            span.stop()
        return self._copy

    def _empty_copy(self) -> nn.Module:
        return empty_copy(self.config, self.settings.dtype, dist.device())

    def _generator_on(self, module: nn.Module) -> InferenceEngine | HuggingFaceGenerator:
        made = module_generator(module, self.settings.engine, self._is_checked, self.in_engine)
        self._is_checked, self.in_engine = True, isinstance(made, InferenceEngine)  # it warns once
        return made
