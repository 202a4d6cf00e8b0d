"""Rank and world size, from the environment of any launcher.

Reads what ``deepspeed``, ``torchrun``, ``mpirun`` or SLURM's ``srun`` set; without a launcher there
is one process. No other module reads these variables. torch loads on first use, so that ``--help``
and error messages can ask for the rank without it.
"""

import os
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# The names that DeepSpeed and torchrun, Open MPI and SLURM give the same three numbers. The size is
# that of SLURM's job step: SLURM_NTASKS stands in batch scripts and shells too, which are alone.
_RANK = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
_WORLD_SIZE = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
_LOCAL_RANK = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
VARIABLES = (*_RANK, *_WORLD_SIZE, *_LOCAL_RANK)


def _environment(names: tuple[str, ...], default: int) -> int:
    for name in names:
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return default


def rank() -> int:
    """This process's number among all processes; 0 without a launcher."""
    return _environment(_RANK, 0) if is_launched() else 0


def world_size() -> int:
    """Number of processes; 1 without a launcher."""
    return _environment(_WORLD_SIZE, 1) if is_launched() else 1


def local_rank() -> int:
    """This process's number on its node: the index of its device."""
    return _environment(_LOCAL_RANK, 0) if is_launched() else 0


def is_main_process() -> bool:
    return rank() == 0


def is_launched() -> bool:
    """Whether a launcher told us where to meet, or we are one of several tasks of SLURM's srun."""
    return "MASTER_ADDR" in os.environ or _environment(_WORLD_SIZE[-1:], 1) > 1


def complete_environment() -> None:
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
