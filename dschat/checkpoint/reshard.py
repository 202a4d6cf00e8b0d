"""Loads DeepSpeed's files into an engine with another layout: ZeRO stage, precision, ranks.

DeepSpeed's universal checkpoint does not read ZeRO 0, writes all states to disk a second time,
unpickles without limits, and gives all parameter groups under ZeRO-3 the settings of the first one.
Here files are mapped into memory and read parameter by parameter; only the last line of `fill`
communicates.
"""

import math
import pickle
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dschat.distributed as dist
from dschat.config import UserError
from dschat.models.training_engine import TrainingEngine

_WEIGHT, _MOMENTS, _STEP = "fp32", ("exp_avg", "exp_avg_sq"), "step"
# One rank's part of a parameter: flat fp32 weights; after the first update Adam's moments and its
# step counter, 0-d.
Fragment = dict[str, Tensor]


def load_file(path: Path, map_location: Any = None, mapped: bool = False) -> Any:
    """Load one of DeepSpeed's files, unpickling only the types that it writes."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    known = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
    try:
        with torch.serialization.safe_globals(known):
            return torch.load(path, map_location=map_location, weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        match = re.search(r"(?:GLOBAL|Unsupported global:) (\S+)", str(error))
        name = match[1] if match else str(error).splitlines()[0]
        raise UserError(
            f"--resume {path.parents[1]}: {path} asks for {name}, which is no state that this "
            "version of DeepSpeed writes; it is not loaded"
        ) from None


@dataclass
class SavedEngine:
    """DeepSpeed's files of one engine, in ``folder``, written by ``world_size`` processes.

    ``head``: the part that all processes share; its weights are mapped into memory.
    """

    folder: Path
    world_size: int
    head: dict[str, Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        path = min(self.folder.glob("*mp_rank_00_model_states.pt"))
        self.head = load_file(path, "cpu", mapped=True)

    @property
    def config(self) -> dict[str, Any]:
        """DeepSpeed's configuration of the run that saved it."""
        return self.head["ds_config"]

    @property
    def stage(self) -> int:
        return self.config["zero_optimization"]["stage"]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the trained parameters, by name."""
        if self.stage == 0:
            module = self.head["module"]
            return {n: tuple(module[n].shape) for names in self.head["groups"] for n in names}
        return {n: tuple(s) for group in self.head["param_shapes"] for n, s in group.items()}

    def loss_scaler(self) -> Any:
        """fp16's loss scaler with its state; None under ZeRO 0."""
        return self._shard(0)["loss_scaler"] if self.stage else None

    def parameters(self) -> dict[str, list[Fragment]]:
        """Every trained parameter's fragments in order; under ZeRO-3 with padding at the end."""
        if self.stage == 0:
            return {name: [fragment] for name, fragment in self._whole()}
        fragments: dict[str, list[Fragment]] = {}
        cut = self._sharded if self.stage == 3 else self._flattened
        for rank in range(self.world_size):
            for name, fragment in cut(self._shard(rank)):
                fragments.setdefault(name, []).append(fragment)
        return fragments

    def _shard(self, rank: int) -> dict[str, Any]:
        (path,) = self.folder.glob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        return load_file(path, "cpu", mapped=True)["optimizer_state_dict"]

    def _whole(self) -> Iterator[tuple[str, Fragment]]:
        """ZeRO 0: torch's optimizer, whose states are numbered."""
        module, optimizer = self.head["module"], self.head["optimizer"]
        for names, group in zip(self.head["groups"], optimizer["param_groups"], strict=True):
            for name, number in zip(names, group["params"], strict=True):
                states = optimizer["state"].get(number, {})
                yield name, _fragment(module[name], states, 0, module[name].numel())

    def _flattened(self, shard: dict[str, Any]) -> Iterator[tuple[str, Fragment]]:
        """ZeRO 1 and 2: each group flattened, and partitioned regardless of parameters."""
        states = shard["base_optimizer_state"]["state"]
        for i, places in enumerate(shard["param_slice_mappings"]):
            weights = shard["single_partition_of_fp32_groups"][i]
            for name, at in places.items():
                yield name, _fragment(weights, states.get(i, {}), at.start, at.numel)

    def _sharded(self, shard: dict[str, Any]) -> Iterator[tuple[str, Fragment]]:
        """ZeRO-3: every parameter partitioned equally."""
        states = shard["optimizer_state_dict"]["state"]
        for i, shapes in enumerate(self.head["param_shapes"]):
            start = 0
            for name, shape in shapes.items():
                size = -(-math.prod(shape) // self.world_size)
                yield name, _fragment(shard["fp32_flat_groups"][i], states.get(i, {}), start, size)
                start += size


def _fragment(weights: Tensor, states: dict[str, Any], start: int, numel: int) -> Fragment:
    tensors = {_WEIGHT: weights} | {name: states[name] for name in _MOMENTS if name in states}
    cut = {name: t.reshape(-1).narrow(0, start, numel) for name, t in tensors.items()}
    return cut | {_STEP: states[_STEP]} if _STEP in states else cut


@dataclass
class _Slice:
    """A slice of a parameter in a flat tensor: elements [start, start + numel) of the parameter
    are at [at, at + numel).
    """

    name: str
    at: int
    start: int
    numel: int


def fill(engine: TrainingEngine, saved: SavedEngine) -> None:
    """Collective. Load weights and optimizer states of ``saved`` into a new ``engine``."""
    parameters = saved.parameters()
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    for flat, places in _master_weights(engine):
        states: dict[str, Tensor] = {}
        for place in places:
            fragments = parameters[place.name]
            for key, first in fragments[0].items():
                if key == _STEP:
                    states[key] = first.to(flat.device, copy=True)
                    continue
                if key != _WEIGHT and key not in states:
                    states[key] = torch.zeros_like(flat)
                target = flat.data if key == _WEIGHT else states[key]
                parts = [fragment[key] for fragment in fragments]
                _copy(parts, place.start, target.view(-1)[place.at :][: place.numel])
        if states:  # none before the first step
            inner.state[flat] = states
    _update_weights(engine)


def _copy(parts: list[Tensor], start: int, target: Tensor) -> None:
    """Fill ``target`` (flat) with the elements of the concatenated ``parts`` from ``start``; reads
    no other elements.
    """
    at = 0
    for part in parts:
        first, last = max(start, at), min(start + len(target), at + len(part))
        if first < last:
            target[first - start : last - start] = part[first - at : last - at]
        at += len(part)


def _master_weights(engine: TrainingEngine) -> Iterator[tuple[Tensor, list[_Slice]]]:
    """The flat tensors that the optimizer of ``engine`` updates, and the slices in them."""
    optimizer, stage = engine.optimizer, engine.zero_optimization_stage()
    names = engine.param_names
    if stage == 0:
        for group in optimizer.param_groups:
            for p in group["params"]:
                yield p, [_Slice(names[p], 0, 0, p.numel())]
    elif stage == 3:
        rank = dist.rank()
        groups = zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True)
        for flat, params in groups:
            places, at = [], 0
            for p in params:
                size = -(-p.ds_numel // dist.world_size())
                real = max(0, min(size, p.ds_numel - rank * size))
                places.append(_Slice(names[p], at, rank * size, real))
                at += size
            yield flat, places
    else:
        groups = zip(optimizer.single_partition_of_fp32_groups, optimizer.bit16_groups, strict=True)
        for flat, params in groups:
            mapped = [(names[p], p._hp_mapping) for p in params if p._hp_mapping is not None]
            cut = [(name, m.hp_fragment_address, m.lp_fragment_address) for name, m in mapped]
            yield flat, [_Slice(name, hp.start, lp.start, lp.numel) for name, hp, lp in cut]


def _update_weights(engine: TrainingEngine) -> None:
    """Collective. Update the model's weights from the optimizer's fp32 weights."""
    optimizer, stage = engine.optimizer, engine.zero_optimization_stage()
    if stage == 3:
        for i in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(i)
    elif stage > 0:
        optimizer.update_lp_params()
