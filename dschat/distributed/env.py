"""Rank and world size, from the environment of any launcher.

Reads what ``deepspeed``, ``torchrun``, ``mpirun`` or SLURM's ``srun`` set; without a launcher there
is one process. No other module reads these variables. torch loads on first use, so that ``--help``
and error messages can ask for the rank without it.
"""

import os
import re
import warnings
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

from dschat.config import UserError

if TYPE_CHECKING:
    import torch

# Names of the same three numbers: DeepSpeed and torchrun, Open MPI, SLURM. The world size is that
# of SLURM's job step: SLURM_NTASKS is also set in batch scripts and shells, which run one process.
_RANK = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
_WORLD_SIZE = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
_LOCAL_RANK = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
_BY_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"  # set by deepspeed's import: a weaker check
VARIABLES = (*_RANK, *_WORLD_SIZE, *_LOCAL_RANK)


_variables: Mapping[str, str] = os.environ


def pin(is_joined: bool) -> None:
    """Read the present variables until this is undone: the user's code may change them."""
    global _variables
    _variables = dict(os.environ) if is_joined else os.environ


def _environment(names: tuple[str, ...], default: int) -> int:
    for name in names:
        if _variables.get(name, "").isdigit():
            return int(_variables[name])
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
    """Whether a launcher set MASTER_ADDR, or SLURM's srun started several tasks."""
    return "MASTER_ADDR" in _variables or _environment(_WORLD_SIZE[-1:], 1) > 1


def complete_environment() -> None:
    """Set the variables that torch and DeepSpeed read from those that the launcher set.

    srun names no rendezvous: the step's first machine has rank 0, and the port is derived from the
    numbers of job and step, so it is the same on all machines and differs between jobs.
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

    return torch.device("cuda", local_rank()) if has_gpu() else torch.device("cpu")


@cache
def has_gpu() -> bool:
    """Whether processes of this machine compute on GPUs; DS_ACCELERATOR=cpu forbids it.

    Asked once: DeepSpeed's import lets torch count devices that its CUDA cannot start.

    Raises:
        UserError: there are GPUs, and torch's build of CUDA cannot use them.
    """
    import torch

    if os.environ.get("DS_ACCELERATOR") == "cpu":
        return False
    by_nvml = os.environ.pop(_BY_NVML, None)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = torch.cuda.is_available()
    finally:
        if by_nvml is not None:
            os.environ[_BY_NVML] = by_nvml
    if not found and (reason := next((w for w in caught if "driver" in str(w.message)), None)):
        text = str(reason.message).split(" Please")[0].split(" (Triggered")[0]
        raise UserError(
            f"torch {torch.__version__} cannot use this machine's GPUs: {text} Update the driver, "
            "or install a torch build of its CUDA version; DS_ACCELERATOR=cpu computes without"
        )
    return found
