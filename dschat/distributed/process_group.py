"""Joins and leaves the process group; starts the failure detector."""

import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_dist

from dschat.config import UserError
from dschat.distributed import collectives
from dschat.distributed.collectives import gather_objects
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
        UserError: not all processes joined within ``JOIN_MINUTES``, they were started with
            different flags, or a node has more of them than GPUs.
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
        check_same(flags_of(sys.argv))  # else they would hang
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


def flags_of(argv: Sequence[str]) -> dict[str, str]:
    """The script and the flags of a command, which all ranks share, with the values of each."""
    script = os.sep.join(os.path.abspath(argv[0]).split(os.sep)[-2:])
    flags = re.split(" (?=--)", " ".join(["script", script, *argv[1:]]))
    named = dict(flag.partition(" ")[::2] for flag in flags)
    return {k: v for k, v in named.items() if not re.match("--local[-_]rank", k)}


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
        collectives.forget_group()
        pin(False)
        torch_dist.destroy_process_group()
