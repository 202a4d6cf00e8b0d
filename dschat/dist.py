"""Rank, world and collectives: the only module that reads the launcher's environment or calls
torch.distributed.

Comes in: the environment a launcher set (``deepspeed``, ``torchrun``, SLURM's ``srun``), or nothing
at all. Goes out: numbers and collectives that mean the same with one process, so callers have no
second code path. It must not know models, data or DeepSpeed. torch is imported on first use, so
that ``--help`` and error messages can ask for the rank without it.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def _environment(name: str, slurm_name: str, default: int) -> int:
    for key in (name, slurm_name):
        if os.environ.get(key, "").isdigit():
            return int(os.environ[key])
    return default


def rank() -> int:
    """This process's number among all processes; 0 without a launcher."""
    return _environment("RANK", "SLURM_PROCID", 0) if _launched() else 0


def world_size() -> int:
    """Number of processes; 1 without a launcher."""
    return _environment("WORLD_SIZE", "SLURM_NTASKS", 1) if _launched() else 1


def local_rank() -> int:
    """This process's number on its node: the index of its device."""
    return _environment("LOCAL_RANK", "SLURM_LOCALID", 0) if _launched() else 0


def is_main_process() -> bool:
    return rank() == 0


def _launched() -> bool:
    """Whether a launcher told us where to meet; an interactive shell inside a SLURM job has not."""
    return "MASTER_ADDR" in os.environ


def device() -> "torch.device":
    """The device of this process: its own CUDA device, or the CPU."""
    import torch

    if torch.cuda.is_available():
        return torch.device("cuda", local_rank())
    return torch.device("cpu")


def init(timeout_minutes: float = 60.0) -> None:
    """Collective. Join the process group (NCCL on CUDA, gloo on CPU); harmless when already joined.

    Without a launcher it makes a group of one that needs neither network nor port.
    """
    import torch
    import torch.distributed as torch_dist

    if torch_dist.is_initialized():
        return
    os.environ.setdefault("LOCAL_RANK", str(local_rank()))  # DeepSpeed insists on finding it
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank())
    # Both back ends on CUDA: metrics and flags live on the CPU and should not wait for kernels.
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    timeout = timedelta(minutes=timeout_minutes)
    if _launched():
        torch_dist.init_process_group(
            backend, rank=rank(), world_size=world_size(), init_method="env://", timeout=timeout
        )
    else:
        store = torch_dist.HashStore()
        torch_dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)


def shutdown() -> None:
    """Leave the process group. Without it a rank sometimes aborts at exit."""
    import torch.distributed as torch_dist

    if torch_dist.is_initialized():
        _handles.clear()
        torch_dist.destroy_process_group()


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


def join_parts(
    sizes: list[int], parts: "list[torch.Tensor]", device: "torch.device"
) -> "Iterator[torch.Tensor]":
    """Collective. Whole flat tensors from every process's parts of them: one collective for all.

    ``parts[i]`` (sizes[i],) is this process's share of tensor i, on any device, all of one dtype;
    item i of the result (world_size * sizes[i],), on ``device``, holds everybody's shares of it in
    rank order. Extra memory: all of them once (on CUDA, and one of them again).
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
    # gloo's all-gather makes a flat copy of its output and takes half as long again as a sum with
    # zeros, whose result needs no reordering either.
    joined = torch.zeros(world * total, dtype=parts[0].dtype)
    for part, offset, size in zip(parts, offsets, sizes, strict=True):
        first = world * offset + rank() * size
        joined[first : first + size].copy_(part)
    torch_dist.all_reduce(joined)
    return (joined[world * o : world * (o + n)] for o, n in zip(offsets, sizes, strict=True))


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
