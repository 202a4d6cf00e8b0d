"""Free and peak memory."""

import mmap
from pathlib import Path

import pytest
import torch

from dschat.distributed import memory

STATUS = Path("/proc/self/status")


def test_host_memory_ends_at_the_containers_limit(container):
    container(3000, 2000, 700)
    assert memory.available_memory() == 1700
    assert memory.free_bytes(torch.device("cpu")) == 1700
    container(3000, 4000, 700)
    assert memory.available_memory() == 0


def test_without_a_limit_the_host_counts(container):
    assert memory.available_memory() > 2**20
    container("max", 2000, 700)
    assert memory.available_memory() > 2**20


def test_a_key_value_cache_fits_the_container(container):
    from families import build, engine

    made = engine(build("llama"), page_size=4, max_num_seqs=8)
    page_bytes = 4 * made.bytes_per_token()
    container(1000 + 10 * page_bytes, 1000, 0)
    assert made.cache.num_pages == 5  # half of what is free


def test_a_released_cache_comes_back_in_its_size(container):
    from families import build, engine

    made = engine(build("llama"), page_size=4, max_num_seqs=8)
    page_bytes = 4 * made.bytes_per_token()
    container(1000 + 20 * page_bytes, 1000, 0)
    assert made.cache.num_pages == 10
    made.release_cache()
    container(1000 + 6 * page_bytes, 1000, 0)  # training has taken the rest
    assert made.cache.num_pages == 10


def test_a_copy_of_the_actor_that_does_not_fit_the_container_is_refused(container):
    from families import build

    from dschat.config import UserError
    from dschat.hybrid.weight_stream import empty_copy

    container(2000, 1000, 0)
    with pytest.raises(UserError, match="a whole copy of the actor"):
        empty_copy(build("llama").config, torch.float32, torch.device("cpu"))


@pytest.mark.skipif(not STATUS.exists(), reason="reads Linux's /proc")
def test_peak_memory_of_a_cpu_process_is_its_high_water_mark():
    memory.earlier_peaks.clear()  # of tests in this process that restarted it
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    high_water_gib = int(line.split()[1]) / 2**20  # given in KiB
    assert memory.peak_memory_gib(torch.device("cpu")) == pytest.approx(high_water_gib, rel=0.1)


def take(num_bytes):
    """Hold pages of our own for a moment. A tensor may get memory that earlier tests have freed and
    that the process still holds.
    """
    with mmap.mmap(-1, num_bytes) as pages:
        for first in range(0, num_bytes, mmap.PAGESIZE):
            pages[first] = 1


@pytest.mark.skipif(not STATUS.exists(), reason="reads Linux's /proc")
def test_a_restarted_peak_counts_from_there_and_the_process_keeps_its_own():
    cpu = torch.device("cpu")
    take(2**28)
    whole = memory.peak_memory_gib(cpu)
    held = memory.restart_peak(cpu)
    assert memory.peak_bytes(cpu) - held < 2**26
    take(2**27)
    assert memory.peak_bytes(cpu) - held == pytest.approx(2**27, rel=0.1)
    assert memory.peak_memory_gib(cpu) >= whole


def test_free_memory_counts_what_tensors_can_still_take(monkeypatch):
    """Not what another device or the pool of a graph has."""
    segments = [
        {"device": 1, "segment_pool_id": (0, 0), "total_size": 100, "allocated_size": 60},
        {"device": 1, "segment_pool_id": (0, 1), "total_size": 1000, "allocated_size": 0},
        {"device": 0, "segment_pool_id": (0, 0), "total_size": 5000, "allocated_size": 0},
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7, 10_000))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert memory.free_bytes(torch.device("cuda", 1)) == 47
    assert memory.free_bytes(torch.device("cuda")) == 47


@pytest.mark.gpu
def test_free_memory_shrinks_by_what_a_tensor_takes():
    device = torch.device("cuda", 0)
    before = memory.free_bytes(device)
    held = torch.empty(2**30, dtype=torch.uint8, device=device)
    assert before - memory.free_bytes(device) == pytest.approx(held.nbytes, rel=0.05)


@pytest.mark.gpu
def test_peak_memory_of_a_gpu_counts_its_tensors():
    torch.cuda.reset_peak_memory_stats()
    memory.earlier_peaks.clear()
    before = memory.peak_memory_gib(torch.device("cuda"))
    torch.ones(2**28, device="cuda")  # 1 GiB, dropped at once
    assert memory.peak_memory_gib(torch.device("cuda")) == pytest.approx(before + 1.0, abs=0.01)
