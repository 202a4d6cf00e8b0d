"""GPU or CPU: one answer for the whole process, whatever torch says later."""

import os
import warnings

import pytest
import torch

import dschat.distributed as dist
from dschat.config import UserError
from dschat.distributed import env

BY_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
OLD = (
    "CUDA initialization: The NVIDIA driver on your system is too old (found version 11040). "
    "Please update your GPU driver by downloading and installing a new version (Triggered "
    "internally at c10/cuda/CUDAFunctions.cpp:108.)"
)


@pytest.fixture
def torch_finds(monkeypatch):
    """Torch's answer, like that of a machine whose driver may be too old for its CUDA."""

    def finds(number, driver_is_old=False):
        def is_available():
            if os.environ.get(BY_NVML) == "1":
                return number > 0
            if driver_is_old:
                warnings.warn(OLD, stacklevel=2)
            return number > 0 and not driver_is_old

        monkeypatch.setattr(torch.cuda, "is_available", is_available)

    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    env.has_gpu.cache_clear()
    yield finds
    env.has_gpu.cache_clear()


@pytest.mark.parametrize("by_nvml", [False, True])
def test_a_driver_that_is_too_old_is_named(by_nvml, torch_finds, monkeypatch):
    """Whether or not deepspeed was imported before; and no process takes the CPU instead."""
    monkeypatch.delenv(BY_NVML, raising=False)
    if by_nvml:
        monkeypatch.setenv(BY_NVML, "1")
    torch_finds(1, driver_is_old=True)
    version = torch.__version__.partition("+")[0]
    with pytest.raises(UserError, match=rf"^torch {version}.*too old \(found version"):
        dist.device()
    assert os.environ.get(BY_NVML) == ("1" if by_nvml else None)


def test_the_answer_stays(torch_finds, monkeypatch):
    torch_finds(0)
    assert dist.device().type == "cpu"
    torch_finds(1)
    assert dist.device().type == "cpu"


def test_the_cpu_may_be_asked_for(torch_finds, monkeypatch):
    torch_finds(1)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert dist.device().type == "cpu"
