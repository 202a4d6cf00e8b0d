"""Collectives with one code path for one process and for many."""

import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor

from dschat.distributed.env import is_main_process, rank, world_size


def barrier() -> None:
    """Collective. Wait until every process has called it."""
    if torch_dist.is_initialized():
        torch_dist.all_reduce(torch.zeros(1))


def all_reduce_sum(tensor: Tensor) -> Tensor:
    """Collective. Sum over processes, in place; same shape, dtype and device."""
    if torch_dist.is_initialized():
        torch_dist.all_reduce(tensor)
    return tensor


def sum_floats(values: list[float]) -> list[float]:
    """Collective. Sum each entry over processes, in float64; all pass equally many."""
    return all_reduce_sum(torch.tensor(values, dtype=torch.float64)).tolist()


def sum_named(values: Mapping[str, float]) -> dict[str, float]:
    """Collective. `sum_floats` by name; all pass the same names in the same order."""
    return dict(zip(values, sum_floats(list(values.values())), strict=True))


def max_int(value: int) -> int:
    """Collective. The largest ``value`` of any process."""
    tensor = torch.tensor([value], dtype=torch.int64)
    if torch_dist.is_initialized():
        torch_dist.all_reduce(tensor, op=torch_dist.ReduceOp.MAX)
    return int(tensor.item())


def all_gather_flat(gathered: Tensor, shard: Tensor, group: Any = None) -> None:
    """Collective. Flat ``shard`` (n,) of every rank of the group into ``gathered`` (ranks * n,)."""
    # torch 2.13 deprecates the older name
    gather = getattr(torch_dist, "all_gather_single", None) or torch_dist.all_gather_into_tensor
    gather(gathered, shard, group=group)


def all_gather_shards(
    sizes: list[int], parts: list[Tensor], device: torch.device
) -> Iterator[Tensor]:
    """Collective. Gathers the shards of several flat tensors in one collective.

    ``parts[i]`` (sizes[i],) is this process's shard of tensor i, on any device, all of one dtype;
    item i of the result (world_size * sizes[i],), on ``device``, holds all ranks' shards of it in
    rank order. Extra memory: all tensors once, on CUDA one of them again.
    """
    world, total = world_size(), sum(sizes)
    offsets = [sum(sizes[:i]) for i in range(len(sizes))]
    if device.type == "cuda":
        joined = torch.empty(world, total, dtype=parts[0].dtype, device=device)
        local = joined[rank()]  # NCCL gathers in place
        for part, offset, size in zip(parts, offsets, sizes, strict=True):
            local[offset : offset + size].copy_(part)
        all_gather_flat(joined.view(-1), local)
        return (joined[:, o : o + n].reshape(-1) for o, n in zip(offsets, sizes, strict=True))
    # A sum with zeros: gloo's all-gather makes a flat copy of its output and takes 1.5 times as
    # long.
    joined = torch.zeros(world * total, dtype=parts[0].dtype)
    for part, offset, size in zip(parts, offsets, sizes, strict=True):
        first = world * offset + rank() * size
        joined[first : first + size].copy_(part)
    torch_dist.all_reduce(joined)
    return (joined[world * o : world * (o + n)] for o, n in zip(offsets, sizes, strict=True))


def gather_objects(value: Any, size: int | None = None, group: Any = None) -> list[Any]:
    """Collective. Every process's ``value`` (picklable, small), in rank order, on every process; of
    torch's process group ``group``, if it is given with its ``size``.
    """
    size = world_size() if size is None else size
    if size == 1:
        return [value]
    values: list[Any] = [None] * size
    torch_dist.all_gather_object(values, value, group=group)
    return values


def exchange_objects(values: list[Any]) -> list[Any]:
    """Collective. ``values[r]`` (picklable) goes to rank r; returns what each rank sent to this
    one, in rank order.
    """
    if world_size() == 1:
        return values
    sent = [torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8) for value in values]
    sizes = torch.tensor([len(each) for each in sent])
    to_come = torch.empty_like(sizes)
    torch_dist.all_to_all_single(to_come, sizes)
    received = torch.empty(int(to_come.sum()), dtype=torch.uint8)
    torch_dist.all_to_all_single(received, torch.cat(sent), to_come.tolist(), sizes.tolist())
    return [pickle.loads(part.numpy().data) for part in received.split(to_come.tolist())]


@contextmanager
def main_process_first() -> Iterator[None]:
    """Collective. Rank 0 runs the block first; the others then find its files on disk."""
    if not is_main_process():
        barrier()
    try:
        yield
    finally:
        if is_main_process():
            barrier()


def my_share(indices: list[int]) -> list[int]:
    """This process's contiguous slice of ``indices``; the slices of all ranks cover it."""
    count, size, index = len(indices), world_size(), rank()
    return indices[count * index // size : count * (index + 1) // size]
