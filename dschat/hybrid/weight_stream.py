"""Seam 2 on a live model: whole weights, under their Hugging Face names, out of ZeRO's own shards.

A training module comes in (ZeRO 0-3, offloaded or not, LoRA or not); an iterator of
``(hf_parameter_name, full_tensor)`` goes out. Under ZeRO-3 the ranks' shards are joined by one
collective per bucket of parameters; DeepSpeed's parameter status is never touched. Where a rank
already holds whole weights nothing moves. It must not know who reads the stream.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import dschat.distributed as dist
from dschat.models.lora import LoraAdapter, adapters, merge, unwrapped_name

_LAYER = re.compile(r"\.(\d+)\.")


@dataclass
class Buckets:
    """How much one collective joins, and what has been joined so far.

    A bucket ends at ``max_bytes`` or before the layer after ``max_layers``, whichever comes first.
    """

    max_bytes: int = field(default_factory=lambda: _bucket_bytes())
    max_layers: int = 8
    num_collectives: int = 0
    num_bytes: int = 0  # of whole tensors, gathered or read where they lie


@dataclass
class Shard:
    """This rank's part of a tensor. ``partitioned``: elements [r * n, (r + 1) * n), padded."""

    name: str
    shape: torch.Size
    tensor: Tensor  # (n,) if partitioned, else of `shape`
    partitioned: bool

    @property
    def numel(self) -> int:
        return self.shape.numel()


def module_shards(module: nn.Module) -> list[Shard]:
    """Every parameter and saved buffer of ``module``, by its own name, as this rank holds it."""
    shards = []
    for name, p in module.named_parameters():
        if hasattr(p, "ds_tensor"):
            shards.append(Shard(name, torch.Size(p.ds_shape), p.ds_tensor.data, partitioned=True))
        else:
            shards.append(Shard(name, p.shape, p.data, partitioned=False))
    saved = module.state_dict(keep_vars=True).keys()
    for name, buffer in module.named_buffers():
        if name in saved:
            shards.append(Shard(name, buffer.shape, buffer, partitioned=False))
    return shards


def _bucket_bytes() -> int:
    """On a CPU about what its caches hold: a refresh of 500 MB on two ranks takes 1.26 s instead of
    1.41 with 256 MiB, and half the memory.
    """
    return (256 if dist.device().type == "cuda" else 48) * 2**20


def whole_tensors(
    shards: list[Shard], device: torch.device, buckets: Buckets | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Collective. Yield every shard's whole tensor; all ranks must walk the stream to its end.

    Partitioned ones come first, one collective a bucket. Extra memory: one bucket. A yielded tensor
    of a partitioned parameter is valid until the next one is asked for.
    """
    buckets = buckets or Buckets()
    bucket: list[Shard] = []
    used, layers = 0, set()
    for shard in shards:
        if not shard.partitioned:
            continue
        found = _LAYER.search(shard.name)
        layer = {int(found[1])} if found else set()
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
            yield shard.name, shard.tensor


def _gather(
    bucket: list[Shard], device: torch.device, buckets: Buckets
) -> Iterator[tuple[str, Tensor]]:
    """Collective. The tensors of a bucket, whole: one collective for all of them."""
    if not bucket:
        return
    sizes = [shard.tensor.numel() for shard in bucket]
    buckets.num_bytes += sum(s.numel * s.tensor.element_size() for s in bucket)
    if dist.world_size() == 1:  # the shard is the weight: nothing moves but off the CPU
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
    """Collective. The weights of ``module`` as its plain Hugging Face checkpoint names them,
    adapters merged (or, without ``merged``, left out).

    ``replace`` puts other shards in the place of parameters of the same name: the moving average's.
    """
    replace = replace or {}
    own = module_shards(module)
    dtypes = {shard.name: shard.tensor.dtype for shard in own}
    shards = [replace.get(shard.name, shard) for shard in own]
    found = adapters(module) if merged else {}
    parts = {name for adapter in found.values() for name in (adapter.a_name, adapter.b_name)}
    factors = _factors([shard for shard in shards if shard.name in parts], device, buckets)
    rest = [shard for shard in shards if unwrapped_name(shard.name) is not None]
    for name, tensor in whole_tensors(rest, device, buckets):
        target = unwrapped_name(name)
        adapter: LoraAdapter | None = found.get(target)
        if adapter is not None:
            tensor = merge(tensor, factors[adapter.a_name], factors[adapter.b_name], adapter)
        yield target, tensor.to(dtypes[name])
        del tensor  # NOTE: it would keep its bucket alive while the next one is gathered


def weight_bytes(module: nn.Module) -> int:
    """What `weight_stream` yields of ``module``, in all."""
    shards = [shard for shard in module_shards(module) if unwrapped_name(shard.name) is not None]
    return sum(shard.numel * shard.tensor.element_size() for shard in shards)


def _factors(
    shards: list[Shard], device: torch.device, buckets: Buckets | None
) -> dict[str, Tensor]:
    """Collective. LoRA factors, all of them at once: they are small."""
    return {name: t.clone() for name, t in whole_tensors(shards, device, buckets)}


def factor_stream(
    module: nn.Module, device: torch.device, buckets: Buckets | None = None
) -> list[tuple[str, Tensor, Tensor, float]]:
    """Collective. Every adapter as (name of its weight, A (r, in), B (out, r), scaling)."""
    found = adapters(module)
    parts = {name for adapter in found.values() for name in (adapter.a_name, adapter.b_name)}
    shards = [shard for shard in module_shards(module) if shard.name in parts]
    factors = _factors(shards, device, buckets)
    return [(n, factors[a.a_name], factors[a.b_name], a.scaling) for n, a in found.items()]


def adapter_stream(module: nn.Module, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Collective. The adapters (and a trained score head), under the wrapped module's names."""
    wanted = [s for s in module_shards(module) if ".lora_" in s.name or ".score." in f".{s.name}"]
    yield from whole_tensors(wanted, device)
