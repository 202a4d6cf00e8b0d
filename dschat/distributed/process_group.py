"""Joins and leaves the process group; groups of its ranks; starts the failure detector."""

import os
import socket
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor

from dschat.config import UserError
from dschat.distributed.collectives import all_gather_flat, gather_objects
from dschat.distributed.env import (
    complete_environment,
    has_gpu,
    is_launched,
    local_rank,
    pin,
    rank,
    world_size,
)
from dschat.distributed.failure_detector import FailureDetector, announce_exit, watch
from dschat.startup.performance import avoid_cudnn_attention

JOIN_MINUTES = 10.0  # timeout of the rendezvous


def init(timeout_minutes: float = 60.0) -> None:
    """Collective. Join the process group (NCCL on CUDA, gloo on CPU); harmless when already joined.

    Without a launcher: a group of one, without network or port.

    Raises:
        UserError: not all processes joined within ``JOIN_MINUTES``, or a node has more of them than
            GPUs.
    """
    if torch_dist.is_initialized():
        return
    launched = is_launched()  # NOTE: before `complete_environment` sets MASTER_ADDR
    if launched:
        complete_environment()
    os.environ.setdefault("LOCAL_RANK", str(local_rank()))  # DeepSpeed requires it
    if has_gpu():
        check_device(torch.cuda.device_count())
        torch.cuda.set_device(local_rank())
        avoid_cudnn_attention()
    # Both backends on CUDA: metrics and flags live on the CPU and should not wait for kernels.
    backend = "cpu:gloo,cuda:nccl" if has_gpu() else "gloo"
    timeout = timedelta(minutes=timeout_minutes)
    store = meet() if launched else torch_dist.HashStore()
    store.set_timeout(timeout)
    torch_dist.init_process_group(
        backend, store=store, rank=rank(), world_size=world_size(), timeout=timeout
    )
    pin(True)
    if world_size() > 1:
        watch(FailureDetector(rank(), world_size(), os.environ["MASTER_ADDR"], gather_objects))


def meet() -> torch_dist.Store:
    """Wait for all processes at MASTER_ADDR; the timeout is shorter than a collective's."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = timedelta(minutes=JOIN_MINUTES)
    has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's
    try:
        if rank() == 0 and address in ("127.0.0.1", "localhost") and not has_store:
            listener = socket.create_server(("127.0.0.1", port)).detach()  # torch's hears all hosts
            return torch_dist.TCPStore(
                address, port, world_size(), True, timeout, master_listen_fd=listener
            )
        store, _, _ = next(torch_dist.rendezvous("env://", rank(), world_size(), timeout=timeout))
    except (torch_dist.DistError, OSError) as error:
        where = f"{address}:{port}"
        message = (
            f"process {rank()} of {world_size()} did not meet the others at {where} within "
            f"{JOIN_MINUTES:g} minutes ({str(error).splitlines()[0]}); start all of them, and see "
            "that --master_addr and --master_port are the first one's and can be reached"
        )
        if "already in use" in str(error):
            message = f"--master_port: {where} is in use; choose another, or end what listens there"
        if rank() and not local_rank():  # rank 0, which prints errors, is on another machine
            sys.stderr.write(f"error: {message}\n")
        raise UserError(message) from None
    return store


def check_same(values: Mapping[str, Any]) -> None:
    """Collective. ``UserError`` where a rank has other ``values`` than rank 0: it would train on
    something else, or hang.
    """
    first, *others = gather_objects(dict(values))
    for number, theirs in enumerate(others, 1):
        for name in {**first, **theirs}:
            if first.get(name) != theirs.get(name):
                raise UserError(
                    f"process {number} was started with another {name} than process 0 "
                    f"({theirs.get(name)}, where process 0 has {first.get(name)}); start every "
                    "machine with the same command, on the same files"
                )


def check_device(num_gpus: int) -> None:
    """``UserError`` where this process has none of the ``num_gpus`` that it sees to itself."""
    if local_rank() >= num_gpus:
        message = (
            f"process {local_rank()} of this machine sees {num_gpus} GPUs; start one process a "
            "GPU, and let each see all (under SLURM --gpus-per-node, not --gpus-per-task)"
        )
        if rank() and local_rank() == num_gpus:  # rank 0, which prints errors, sees its own
            sys.stderr.write(f"error: {message}\n")
        raise UserError(message)


def shutdown() -> None:
    """Leave the process group; a rank that does not sometimes aborts at exit."""
    announce_exit(0)
    if torch_dist.is_initialized():
        _handles.clear()
        pin(False)
        torch_dist.destroy_process_group()


_handles: dict[int, Any] = {}  # torch's process group of this rank, by size


class RankGroup:
    """Consecutive ranks that compute together: {0, ..., size - 1}, {size, ...}, and so on.

    With ``size`` 1 nothing communicates.
    """

    def __init__(self, size: int = 1) -> None:
        """Collective over all processes where ``size`` > 1; all pass the same sizes.

        Raises:
            ValueError: ``size`` does not divide the number of processes.
        """
        if size < 1 or world_size() % size:
            raise ValueError(f"groups of {size} do not divide {world_size()} processes")
        self.size = size
        self.rank = rank() % size
        self._first = rank() - self.rank
        if size > 1 and size not in _handles:  # one for each size: it holds threads and sockets
            init()
            _handles[size], _ = torch_dist.new_subgroups(size)
        self._handle = _handles.get(size)

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Collective. Sum over the group, in place."""
        if self.size > 1:
            torch_dist.all_reduce(tensor, group=self._handle)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Collective. Every member's ``tensor`` (...) in rank order: (size, ...)."""
        if self.size == 1:
            return tensor.unsqueeze(0)
        gathered = tensor.new_empty(self.size, *tensor.shape)
        all_gather_flat(gathered.view(-1), tensor.reshape(-1), self._handle)
        return gathered

    def all_to_all(self, sent: Tensor, sizes: list[int], received: list[int]) -> Tensor:
        """Collective. Flat pieces of ``sent`` of these ``sizes`` to the members in rank order; the
        pieces that they sent here, of the sizes ``received``, joined.
        """
        joined = sent.new_empty(sum(received))
        as_bytes = sent.device.type == "cpu"  # gloo does not know every dtype
        size = sent.element_size() if as_bytes else 1
        torch_dist.all_to_all_single(
            joined.view(torch.uint8) if as_bytes else joined,
            sent.contiguous().view(torch.uint8) if as_bytes else sent,
            [size * n for n in received],
            [size * n for n in sizes],
            group=self._handle,
        )
        return joined

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Collective. Copy the first member's values to all members, in place."""
        if self.size > 1:
            torch_dist.broadcast(tensor, src=self._first, group=self._handle)
        return tensor

    def gather_objects(self, value: Any) -> list[Any]:
        """Collective. Every member's ``value`` (picklable, small), in rank order."""
        return gather_objects(value, self.size, self._handle)
