"""Streams the whole weights of a training module, under their Hugging Face names; fills a copy of
the module with them, and keeps their moving average.

Works for ZeRO 0-3, offloaded or not, with or without LoRA. Under ZeRO-3 one collective gathers the
shards of a bucket of parameters; DeepSpeed's parameter status is not changed. Weights that a rank
already holds whole are yielded without communication.

The exponential moving average is fp32 and sharded over ranks; `ShardedEMA.shards` substitutes it
for the weights in a stream.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

import dschat.distributed as dist
from dschat.config import UserError
from dschat.distributed.memory import free_bytes
from dschat.inference.model.borrowed import are_adjacent
from dschat.models.lora import LoraAdapter, adapters, merge, unwrapped_name
from dschat.models.quantized import dequantized, is_quantized, whole_dtype
from dschat.models.training_engine import full_shape

_LAYER = re.compile(r"\.(\d+)\.")


@dataclass
class Buckets:
    """Size of a bucket, which one collective gathers, and the totals so far.

    A bucket ends at ``max_bytes`` or after ``max_layers`` layers, whichever is reached first.
    """

    max_bytes: int = field(default_factory=lambda: bucket_bytes(dist.device().type))
    max_layers: int = 8
    num_collectives: int = 0
    num_bytes: int = 0  # of whole tensors, gathered or not


@dataclass
class Shard:
    """Rank r's part of a tensor. If ``partitioned``: its elements [r * n, (r + 1) * n), padded."""

    name: str
    shape: torch.Size
    tensor: Tensor  # (n,) if partitioned; a quantized parameter; else of `shape`
    partitioned: bool

    @property
    def dtype(self) -> torch.dtype:
        """The shape of the whole tensor."""
        return whole_dtype(self.tensor)

    @property
    def numel(self) -> int:
        return self.shape.numel()

    @property
    def is_whole(self) -> bool:
        """Whether ``tensor`` has all elements: of one process, also the partition of ZeRO-3."""
        return not self.partitioned or self.tensor.numel() >= self.numel

    def whole(self) -> Tensor:
        """``tensor``, which must be whole, as a view in the parameter's shape."""
        assert self.is_whole, f"{self.name} is partitioned"
        if not self.partitioned:
            return self.tensor
        return self.tensor.detach().view(-1)[: self.numel].view(self.shape)


def module_shards(module: nn.Module) -> list[Shard]:
    """This rank's shard of every parameter and persistent buffer of ``module``."""
    shards = []
    for name, p in module.named_parameters():
        if hasattr(p, "ds_tensor"):
            shards.append(Shard(name, full_shape(p), p.ds_tensor.data, partitioned=True))
        else:
            values = p if is_quantized(p) else p.data
            shards.append(Shard(name, full_shape(p), values, partitioned=False))
    saved = module.state_dict(keep_vars=True).keys()
    for name, buffer in module.named_buffers():
        if name in saved:
            shards.append(Shard(name, buffer.shape, buffer, partitioned=False))
    return shards


def bucket_bytes(device_type: str) -> int:
    """Default bucket size on "cuda" or "cpu". On a CPU about the size of its caches: a refresh of
    500 MB on two ranks takes 1.26 s, against 1.41 s with 256 MiB, and half the memory.
    """
    return (256 if device_type == "cuda" else 48) * 2**20


def whole_tensors(
    shards: list[Shard], device: torch.device, buckets: Buckets | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Collective. Yields every shard's whole tensor; all ranks must consume the whole stream.

    Partitioned tensors come first, with one collective per bucket. Extra memory: one bucket. A
    gathered tensor is valid until the next one is requested.
    """
    buckets = buckets or Buckets()
    bucket: list[Shard] = []
    used = 0
    layers: set[int] = set()
    for shard in shards:
        if not shard.partitioned:
            continue
        match = _LAYER.search(shard.name)
        layer = {int(match[1])} if match else set()
        same = not bucket or bucket[0].tensor.dtype == shard.tensor.dtype
        size = shard.numel * shard.tensor.element_size()
        full = used + size > buckets.max_bytes or len(layers | layer) > buckets.max_layers
        if bucket and (full or not same):
            yield from _gather(bucket, device, buckets)
            bucket, used, layers = [], 0, set()
        bucket.append(shard)
        used += size
        layers |= layer
    yield from _gather(bucket, device, buckets)
    del bucket
    for shard in shards:
        if not shard.partitioned:
            buckets.num_bytes += shard.tensor.nbytes
            yield shard.name, dequantized(shard.tensor)


def _gather(
    bucket: list[Shard], device: torch.device, buckets: Buckets
) -> Iterator[tuple[str, Tensor]]:
    """Collective. Yields the whole tensors of a bucket, gathered by one collective."""
    if not bucket:
        return
    sizes = [shard.tensor.numel() for shard in bucket]
    buckets.num_bytes += sum(s.numel * s.tensor.element_size() for s in bucket)
    if dist.world_size() == 1:  # the shard is the whole weight, at most offloaded to the CPU
        for shard in bucket:
            flat = shard.tensor.detach().to(device).reshape(-1)
            yield shard.name, flat[: shard.numel].view(shard.shape)
        return
    parts = [shard.tensor.detach().reshape(-1) for shard in bucket]
    joined = dist.all_gather_shards(sizes, parts, device)
    buckets.num_collectives += 1
    for shard, flat in zip(bucket, joined, strict=True):
        yield shard.name, flat[: shard.numel].view(shard.shape)


def weight_stream(
    module: nn.Module,
    device: torch.device,
    replace: dict[str, Shard] | None = None,
    buckets: Buckets | None = None,
    merged: bool = True,
) -> Iterator[tuple[str, Tensor]]:
    """Collective. Yields the weights of ``module`` under their plain Hugging Face names, with
    adapters merged (or, without ``merged``, left out).

    ``replace``: shards to use instead of the parameters of the same name (the moving average's).
    """
    replace = replace or {}
    own_shards = module_shards(module)
    dtypes = {shard.name: shard.dtype for shard in own_shards}
    shards = [replace.get(shard.name, shard) for shard in own_shards]
    by_target = adapters(module) if merged else {}
    factors = _factors(shards, by_target, device, buckets)
    targets = {s.name: t for s in shards if (t := unwrapped_name(s.name)) is not None}
    rest = [shard for shard in shards if shard.name in targets]
    for name, tensor in whole_tensors(rest, device, buckets):
        target = targets[name]
        adapter: LoraAdapter | None = by_target.get(target)
        if adapter is not None:
            tensor = merge(tensor, factors[adapter.a_name], factors[adapter.b_name], adapter)
        yield target, tensor.to(dtypes[name])
        del tensor  # NOTE: it would keep its bucket alive while the next one is gathered


def weight_bytes(module: nn.Module) -> int:
    """Total bytes of the tensors that `weight_stream` yields for ``module``."""
    shards = [shard for shard in module_shards(module) if unwrapped_name(shard.name) is not None]
    return sum(shard.numel * shard.dtype.itemsize for shard in shards)


def _factors(
    shards: list[Shard],
    by_target: dict[str, LoraAdapter],
    device: torch.device,
    buckets: Buckets | None,
) -> dict[str, Tensor]:
    """Collective. All LoRA factors of these adapters by name, copied: they are small."""
    names = {name for adapter in by_target.values() for name in (adapter.a_name, adapter.b_name)}
    chosen = [shard for shard in shards if shard.name in names]
    return {name: t.clone() for name, t in whole_tensors(chosen, device, buckets)}


def factor_stream(
    module: nn.Module, device: torch.device, buckets: Buckets | None = None
) -> list[tuple[str, Tensor, Tensor, float]]:
    """Collective. Every adapter as (name of its weight, A (r, in), B (out, r), scaling)."""
    by_target = adapters(module)
    factors = _factors(module_shards(module), by_target, device, buckets)
    return [(n, factors[a.a_name], factors[a.b_name], a.scaling) for n, a in by_target.items()]


def adapter_stream(module: nn.Module, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Collective. Yields adapters and a trained score head, under the wrapped module's names."""
    shards = [s for s in module_shards(module) if ".lora_" in s.name or ".score." in f".{s.name}"]
    yield from whole_tensors(shards, device)


# -- adjacent --------------------------------------------------------------------------------------
#
# Moves the frozen weights of a fused product back to back, so that one product can read them.
#
# DeepSpeed puts the weights that it trains into flat buffers, where q, k and v are adjacent. A
# frozen one keeps the storage in which it was loaded.


@torch.no_grad()
def place_adjacent(parameters: Mapping[str, nn.Parameter], groups: Iterable[list[str]]) -> None:
    """Give the frozen parameters of each group (names) one buffer.

    Values stay, and addresses change. Groups with a trained, absent or partitioned member are left
    alone. Call it after DeepSpeed's initialize, which allocates ZeRO-3's partitions; extra memory:
    one group.
    """
    for names in groups:
        members = [parameters[name] for name in names if name in parameters]
        if len(members) < len(names) or any(p.requires_grad for p in members):
            continue
        # What holds the values: the parameter, or under ZeRO-3 its partition.
        stored = [getattr(p, "ds_tensor", p) for p in members]
        first = stored[0]
        is_whole = all(
            t.numel() == getattr(p, "ds_numel", p.numel())
            for t, p in zip(stored, members, strict=True)
        )
        is_alike = all(t.dtype == first.dtype and t.device == first.device for t in stored)
        if not (is_whole and is_alike) or are_adjacent([t.view(-1) for t in stored]):
            continue
        buffer = torch.cat([t.reshape(-1) for t in stored])
        sizes = [t.numel() for t in stored]
        for tensor, part in zip(stored, buffer.split(sizes), strict=True):
            tensor.data = part.view(tensor.shape)


def fill(module: nn.Module, stream: Iterable[tuple[str, Tensor]]) -> None:
    """Copy a weight stream into a whole module. Every weight must appear exactly once."""
    targets = module.state_dict(keep_vars=True)
    for name, tensor in stream:
        assert name in targets, f"the weight stream has {name} twice, or the module does not"
        target = targets.pop(name)
        assert target.shape == tensor.shape, f"{name} has another shape"  # copy_ would broadcast
        target.data.copy_(tensor)
        del tensor  # NOTE: it may keep a whole bucket alive while the next one is gathered
    missing = [name for name, _ in module.named_parameters() if name in targets]
    assert not missing, f"the weight stream lacks {missing[:3]}"


def empty_copy(config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """An uninitialized module of ``config``; ``UserError`` with its size if it does not fit."""
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config, dtype=dtype)
    needed = sum(p.numel() * p.element_size() for p in skeleton.parameters())
    free = free_bytes(device)
    if needed > 0.9 * free:
        raise UserError(
            f"a whole copy of the actor for generation takes {needed / 2**30:.1f} GiB per process "
            f"and {free / 2**30:.1f} GiB are free; use a smaller --actor_zero_stage or model"
        )
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).requires_grad_(False).eval()


def _local_part(shard: Shard) -> Tensor:
    """This rank's flat fp32 part: its ZeRO-3 shard, or an equal (padded) slice of a full tensor."""
    if shard.partitioned:
        return shard.tensor.float().reshape(-1)
    size = -(-shard.numel // dist.world_size())
    flat = shard.tensor.detach().reshape(-1)
    part = flat[dist.rank() * size : (dist.rank() + 1) * size].float()
    return torch.nn.functional.pad(part, (0, size - part.numel()))


class ShardedEMA:
    """``average = decay * average + (1 - decay) * weights``, 1/N of it on each of N ranks.

    Covers the parameters that are trained. `update` comes after every optimizer step.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self._module = module
        self._decay = decay
        self._trained = {name for name, p in module.named_parameters() if p.requires_grad}
        # This rank's part of the average, by parameter name: flat, fp32.
        self.tensors = {s.name: _local_part(s).clone() for s in self._shards()}

    def _shards(self) -> list[Shard]:
        return [s for s in module_shards(self._module) if s.name in self._trained]

    @torch.no_grad()
    def update(self) -> None:
        """Update from the current weights. No communication."""
        for shard in self._shards():
            self.tensors[shard.name].lerp_(_local_part(shard), 1 - self._decay)

    def shards(self) -> dict[str, Shard]:
        """The average as shards by parameter name, for `weight_stream`'s ``replace``."""
        return {
            s.name: Shard(s.name, s.shape, self.tensors[s.name], partitioned=True)
            for s in self._shards()
        }
