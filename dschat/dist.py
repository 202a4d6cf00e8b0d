"""Rank, world and collectives: the only module that reads the launcher's environment or calls
torch.distributed.

Comes in: the environment a launcher set (``deepspeed``, ``torchrun``, ``mpirun``, SLURM's
``srun``), or nothing at all. Goes out: numbers and collectives that mean the same with one process,
so callers have no second code path. It must not know models, data or DeepSpeed. torch is imported
on first use, so that ``--help`` and error messages can ask for the rank without it.
"""

import atexit
import functools
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from dschat.config import UserError
from dschat.lifeline import Death, Lifeline
from dschat.shared_memory import AlternatingBuffers

if TYPE_CHECKING:
    import torch


# The names that DeepSpeed and torchrun, Open MPI and SLURM give the same three numbers. The size is
# that of SLURM's job step: SLURM_NTASKS stands in batch scripts and shells too, which are alone.
_RANK = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
_WORLD_SIZE = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
_LOCAL_RANK = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
VARIABLES = (*_RANK, *_WORLD_SIZE, *_LOCAL_RANK)
JOIN_MINUTES = 10.0  # what a process waits for the others at the start


def _environment(names: tuple[str, ...], default: int) -> int:
    for name in names:
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return default


def rank() -> int:
    """This process's number among all processes; 0 without a launcher."""
    return _environment(_RANK, 0) if _launched() else 0


def world_size() -> int:
    """Number of processes; 1 without a launcher."""
    return _environment(_WORLD_SIZE, 1) if _launched() else 1


def local_rank() -> int:
    """This process's number on its node: the index of its device."""
    return _environment(_LOCAL_RANK, 0) if _launched() else 0


def is_main_process() -> bool:
    return rank() == 0


def _launched() -> bool:
    """Whether a launcher told us where to meet, or we are one of several tasks of SLURM's srun."""
    return "MASTER_ADDR" in os.environ or _environment(_WORLD_SIZE[-1:], 1) > 1


def _complete_environment() -> None:
    """Say in everybody's names (torch's and DeepSpeed's) what a launcher said in its own.

    srun names no meeting point: the step's first machine holds rank 0, and a port made of the job's
    and the step's number is the same on all, and not the next job's.
    """
    numbers = {"RANK": rank(), "WORLD_SIZE": world_size(), "LOCAL_RANK": local_rank()}
    for name, number in numbers.items():
        os.environ.setdefault(name, str(number))
    machines = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", "")
    os.environ.setdefault("MASTER_ADDR", first_host(machines))
    job, step = (_environment((name,), 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    os.environ.setdefault("MASTER_PORT", str(12_000 + (job + step) % 20_000 if job else 29_500))


def first_host(machines: str) -> str:
    """The first name in SLURM's compressed list: ``gpu007`` of ``gpu[007-012,020],login1``."""
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", re.split(r",(?![^\[]*\])", machines)[0])


def device() -> "torch.device":
    """The device of this process: its own CUDA device, or the CPU."""
    import torch

    if torch.cuda.is_available():
        return torch.device("cuda", local_rank())
    return torch.device("cpu")


def init(timeout_minutes: float = 60.0) -> None:
    """Collective. Join the process group (NCCL on CUDA, gloo on CPU); harmless when already joined.

    Without a launcher it makes a group of one that needs neither network nor port.

    Raises:
        UserError: not all processes came within ``JOIN_MINUTES``, they were started with different
            flags, or a node has more of them than GPUs.
    """
    import torch
    import torch.distributed as torch_dist

    if torch_dist.is_initialized():
        return
    launched = _launched()  # before the environment says so in any case
    if launched:
        _complete_environment()
    os.environ.setdefault("LOCAL_RANK", str(local_rank()))  # DeepSpeed insists on finding it
    if torch.cuda.is_available():
        _check_device()
        torch.cuda.set_device(local_rank())
    # Both back ends on CUDA: metrics and flags live on the CPU and should not wait for kernels.
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    timeout = timedelta(minutes=timeout_minutes)
    if launched:
        store = _meet()
        store.set_timeout(timeout)
        torch_dist.init_process_group(
            backend, store=store, rank=rank(), world_size=world_size(), timeout=timeout
        )
        _check_same_flags()
        if world_size() > 1:
            _lifelines[:] = [
                Lifeline(rank(), world_size(), os.environ["MASTER_ADDR"], gather_objects)
            ]
    else:
        store = torch_dist.HashStore()
        torch_dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)


def _meet() -> "torch.distributed.Store":
    """Wait for all processes at MASTER_ADDR, shorter than for a slow collective later."""
    import torch.distributed as torch_dist

    try:
        store, _, _ = next(
            torch_dist.rendezvous(
                "env://", rank(), world_size(), timeout=timedelta(minutes=JOIN_MINUTES)
            )
        )
    except torch_dist.DistError as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        message = (
            f"process {rank()} of {world_size()} did not meet the others at {where} within "
            f"{JOIN_MINUTES:g} minutes ({str(error).splitlines()[0]}); start all of them, and see "
            "that --master_addr and --master_port are the first one's and can be reached"
        )
        if rank() and not local_rank():  # rank 0, which speaks for all, is on another machine
            sys.stderr.write(f"error: {message}\n")
        raise UserError(message) from None
    return store


def _check_same_flags() -> None:
    """Collective. Processes that disagree about step or flags would hang, or train nonsense."""
    script = os.sep.join(os.path.abspath(sys.argv[0]).split(os.sep)[-2:])
    flags = re.split(" (?=--)", " ".join([script, *sys.argv[1:]]))  # each with its values
    first, *others = gather_objects([f for f in flags if not re.match("--local[-_]rank", f)])
    for number, words in enumerate(others, 1):
        if words != first:
            ours, theirs = (
                " ".join(word for word in a if word not in b) or "nothing"
                for a, b in ((first, words), (words, first))
            )
            raise UserError(
                f"process {number} was started with other flags than process 0 ({theirs}, where "
                f"process 0 has {ours}); start every machine with the same command"
            )


def _check_device() -> None:
    import torch

    if local_rank() >= torch.cuda.device_count():
        raise UserError(
            f"process {local_rank()} of this machine sees {torch.cuda.device_count()} GPUs; start "
            "one process a GPU, and let each see all (under SLURM --gpus-per-node, not "
            "--gpus-per-task)"
        )


def shutdown() -> None:
    """Leave the process group. Without it a rank sometimes aborts at exit."""
    import torch.distributed as torch_dist

    leave(0)
    if torch_dist.is_initialized():
        _handles.clear()
        _buffers.cache_clear()
        torch_dist.destroy_process_group()


def exit_process(code: int) -> NoReturn:
    """Exit, also while this process is still joined to others.

    NOTE a gloo thread that drops a tensor of the last collective takes the interpreter's lock. If
    the interpreter is being torn down by then, the thread aborts the process (SIGABRT). Leaving the
    group would join that thread, but waits for collectives that the others never enter. So the exit
    handlers run, and the teardown is skipped.
    """
    torch_dist = sys.modules.get("torch.distributed")
    if world_size() == 1 or torch_dist is None or not torch_dist.is_initialized():
        sys.exit(code)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, full, or none
            stream.flush()
    os._exit(code)


_lifelines: list[Lifeline] = []  # of this process, where there are others


def leave(code: int) -> None:
    """Tell the other processes that this one ends, with its exit code: after another code than 0
    they end too. One that ends without this (SIGKILL) takes them with it.
    """
    for lifeline in _lifelines:
        lifeline.leave(code)


def is_watched() -> bool:
    """Whether this process learns of the others' ends."""
    return bool(_lifelines)


def first_death(wait_s: float = 0.0) -> Death | None:
    """The first failure of another process, if that is known within ``wait_s``."""
    return _lifelines[0].first_death(wait_s) if _lifelines else None


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
    """What the processes of a CPU host hold together, for `join_parts`, until `shutdown`."""
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
