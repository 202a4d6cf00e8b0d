"""Collectives that mean the same with one process as with many, so callers have one code path.

torch loads on first use.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dschat.distributed.env import is_main_process, rank, world_size
from dschat.distributed.shared_memory import AlternatingBuffers

if TYPE_CHECKING:
    import torch


def barrier() -> None:
    """Collective. Wait until every process is here."""
    import torch
    import torch.distributed as torch_dist

    if torch_dist.is_initialized():
        torch_dist.all_reduce(torch.zeros(1))


def all_reduce_sum(tensor: "torch.Tensor") -> "torch.Tensor":
    """Collective. Sum over processes, in place; same shape, dtype and device."""
    import torch.distributed as torch_dist

    if torch_dist.is_initialized():
        torch_dist.all_reduce(tensor)
    return tensor


def sum_floats(values: list[float]) -> list[float]:
    """Collective. Sum each entry over processes, in float64; all pass as many entries."""
    import torch

    return all_reduce_sum(torch.tensor(values, dtype=torch.float64)).tolist()


def max_int(value: int) -> int:
    """Collective. The largest ``value`` of any process."""
    import torch
    import torch.distributed as torch_dist

    tensor = torch.tensor([value], dtype=torch.int64)
    if torch_dist.is_initialized():
        torch_dist.all_reduce(tensor, op=torch_dist.ReduceOp.MAX)
    return int(tensor.item())


def all_gather_shards(
    sizes: list[int], parts: "list[torch.Tensor]", device: "torch.device"
) -> "Iterator[torch.Tensor]":
    """Collective. Whole flat tensors from every process's parts of them: one collective for all.

    ``parts[i]`` (sizes[i],) is this process's share of tensor i, on any device, all of one dtype;
    item i of the result (world_size * sizes[i],), on ``device``, holds everybody's shares of it in
    rank order. Extra memory: all of them once (on CUDA, and one of them again); on a CPU host twice
    for all its processes together. Good until the next call but one.
    """
    import torch
    import torch.distributed as torch_dist

    world, total = world_size(), sum(sizes)
    offsets = [sum(sizes[:i]) for i in range(len(sizes))]
    if device.type == "cuda":
        joined = torch.empty(world, total, dtype=parts[0].dtype, device=device)
        mine = joined[rank()]  # NCCL gathers in place
        for part, offset, size in zip(parts, offsets, sizes, strict=True):
            mine[offset : offset + size].copy_(part)
        torch_dist.all_gather_into_tensor(joined.view(-1), mine)
        return (joined[:, o : o + n].reshape(-1) for o, n in zip(offsets, sizes, strict=True))
    dtype = parts[0].dtype
    shared = _buffers().next(world * total * dtype.itemsize)
    # Without shared memory a sum with zeros: gloo's all-gather makes a flat copy of its output and
    # takes half as long again.
    joined = torch.zeros(world * total, dtype=dtype) if shared is None else shared.view(dtype)
    for part, offset, size in zip(parts, offsets, sizes, strict=True):
        first = world * offset + rank() * size
        joined[first : first + size].copy_(part)
    torch_dist.all_reduce(joined if shared is None else torch.zeros(1))
    return (joined[world * o : world * (o + n)] for o, n in zip(offsets, sizes, strict=True))


def shared_bytes() -> int:
    """What the processes of a CPU host hold together, for `all_gather_shards`, until `shutdown`."""
    return _buffers().num_bytes


@functools.cache
def _buffers() -> AlternatingBuffers:
    return AlternatingBuffers(is_main_process(), gather_objects)


def gather_objects(value: Any) -> list[Any]:
    """Collective. Every process's ``value`` (picklable, small), in rank order, on every process."""
    import torch.distributed as torch_dist

    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    torch_dist.all_gather_object(values, value)
    return values


@contextmanager
def main_process_first() -> Iterator[None]:
    """Collective. Rank 0 runs the block before the others, which then find its files on disk."""
    if not is_main_process():
        barrier()
    try:
        yield
    finally:
        if is_main_process():
            barrier()


def my_share(indices: list[int]) -> list[int]:
    """This process's contiguous part of ``indices``; together the parts are all of them."""
    count, size, me = len(indices), world_size(), rank()
    return indices[count * me // size : count * (me + 1) // size]


_handles: dict[int, Any] = {}  # torch's group of this process, by size


class Group:
    """Some processes that compute together; one process is a group too, and talks to nobody.

    ``size`` consecutive ranks form a group: {0, ..., size - 1}, {size, ...}, and so on.
    """

    def __init__(self, size: int = 1) -> None:
        """Collective over all processes where ``size`` > 1; all must ask for the same sizes.

        Raises:
            ValueError: ``size`` does not divide the number of processes.
        """
        if size < 1 or world_size() % size:
            raise ValueError(f"groups of {size} do not divide {world_size()} processes")
        self.size = size
        self.rank = rank() % size
        self._handle: Any = None
        self._first = rank() - self.rank
        if size == 1:
            return
        if size not in _handles:  # a process group holds threads and sockets: one a size
            import torch.distributed as torch_dist

            from dschat.distributed.process_group import init

            init()
            groups = [
                torch_dist.new_group(list(range(first, first + size)))
                for first in range(0, world_size(), size)
            ]
            _handles[size] = groups[rank() // size]
        self._handle = _handles[size]

    def all_reduce_sum(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """Collective. Sum over the group, in place."""
        if self.size > 1:
            import torch.distributed as torch_dist

            torch_dist.all_reduce(tensor, group=self._handle)
        return tensor

    def all_gather(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """Collective. Every member's ``tensor`` (...) in rank order: (size, ...)."""
        if self.size == 1:
            return tensor.unsqueeze(0)
        import torch.distributed as torch_dist

        gathered = tensor.new_empty(self.size, *tensor.shape)
        torch_dist.all_gather_into_tensor(gathered.view(-1), tensor.reshape(-1), group=self._handle)
        return gathered

    def broadcast(self, tensor: "torch.Tensor") -> "torch.Tensor":
        """Collective. The first member's values for everybody, in place."""
        if self.size > 1:
            import torch.distributed as torch_dist

            torch_dist.broadcast(tensor, src=self._first, group=self._handle)
        return tensor

    def gather_objects(self, value: Any) -> list[Any]:
        """Collective. Every member's ``value`` (picklable, small), in rank order."""
        if self.size == 1:
            return [value]
        import torch.distributed as torch_dist

        values: list[Any] = [None] * self.size
        torch_dist.all_gather_object(values, value, group=self._handle)
        return values


def forget_group() -> None:
    """Drop what belongs to the process group that is being destroyed."""
    _handles.clear()
    _buffers.cache_clear()
