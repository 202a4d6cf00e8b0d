"""The devices of a plan: memory of this machine's or a named one, and the speeds of named GPUs.

Peak rates are the makers': dense 16-bit tensor FLOPs without sparsity, memory bandwidth, NVLink in
one direction (data sheets give both together), PCIe x16 in one direction. Network and host memory
are one GPU's share of the maker's 8-GPU system.

No torch until `find_device` looks at a GPU: train.py's flags name devices.
"""

from dataclasses import dataclass
from typing import Optional

import dschat.distributed as dist
from dschat.config import UserError
from dschat.distributed.memory import available_memory
from dschat.estimate import PlanRequest

GIB = 2**30
GB = 1e9
TERA = 1e12

# Memory of a process before any model. CPU: Python with torch, transformers, DeepSpeed and data,
# measured. GPU: an allowance for the CUDA context, cuBLAS and NCCL.
LIBRARIES = {"cpu": 0.5 * GIB, "cuda": 0.75 * GIB}


@dataclass(frozen=True)
class DeviceSpeed:
    """What one device can do; rates per second, of links in one direction."""

    name: str
    memory_gib: float
    flops: float  # peak of dense matrix products in 16 bits
    bandwidth: float  # bytes of device memory
    link: float  # bytes to the other devices of a node
    network: float  # bytes to other nodes
    pcie: float  # bytes between device and host
    host_bandwidth: float  # bytes of host memory, its share of the node's


_ROWS = (
    # name, GiB, TFLOPs; GB/s of memory, link, network, PCIe, an eighth of a node's host memory
    ("V100-32", 32, 125, 900, 150, 6.25, 16, 19.2),  # V100 data sheet 2020; DGX-1
    # RTX A6000 data sheet 2021. NVLink joins pairs only: PCIe. No reference system: one 200 Gb/s
    # port for 8.
    ("A6000-48", 48, 154.8, 768, 32, 3.125, 32, 25.6),
    ("A100-40", 40, 312, 1555, 300, 25, 32, 51.2),  # A100 data sheet 2021; DGX A100
    ("A100-80", 80, 312, 2039, 300, 25, 32, 51.2),  # the same
    ("A800-80", 80, 312, 2039, 200, 25, 32, 51.2),  # A800 data sheet 2022; as DGX A100
    ("H100-80", 80, 989.4, 3350, 450, 50, 64, 76.8),  # H100 SXM data sheet 2023; DGX H100
    ("H200-141", 141, 989.4, 4800, 450, 50, 64, 76.8),  # H200 SXM data sheet 2024; DGX H200
)
DEVICES = {
    name: DeviceSpeed(name, gib, flops * TERA, *(rate * GB for rate in rates))
    for name, gib, flops, *rates in _ROWS
}


def find_speed(name: str) -> DeviceSpeed:
    """The device of that name in any case.

    Raises:
        UserError: no such device, with the known names.
    """
    if name.upper() in DEVICES:
        return DEVICES[name.upper()]
    raise UserError(f"--plan_device {name}: no such device; choose from {', '.join(DEVICES)}")


def speed_of(gpu_name: str, memory_bytes: int) -> Optional[DeviceSpeed]:
    """The row for torch's name of a GPU; None if it has none."""
    words = gpu_name.upper().replace("-", " ").split()
    for name, device in DEVICES.items():
        kind, gib = name.partition("-")[0], device.memory_gib
        is_near = abs(memory_bytes / GIB - gib) < 0.15 * gib
        if is_near and any(word.startswith(kind) for word in words):
            return device
    return None


@dataclass(frozen=True)
class Device:
    """One process's share of a machine: bytes of device and host memory (None: unknown)."""

    kind: str  # cuda or cpu
    memory: int
    host_memory: Optional[int]
    origin: str  # for the report: the device's name, or the flag that gave its memory
    processes_here: int = 1  # that share the host
    speed: Optional[DeviceSpeed] = None  # None: of a CPU, or not known

    @property
    def on_gpu(self) -> bool:
        return self.kind == "cuda"

    @property
    def libraries(self) -> int:
        return int(LIBRARIES[self.kind])


def find_device(request: PlanRequest) -> Device:
    """The GPU that the request names or gives the memory of; without either this machine's GPU, or
    a process's share of its memory.

    If this machine has no GPU, it is in another machine, whose host memory is unknown. NOTE:
    reading a GPU's memory creates a CUDA context, which takes memory itself; the estimate runs in a
    short-lived process.
    """
    named = find_speed(request.device_name) if request.device_name else None
    gib, here = request.device_memory_gib, request.processes_here
    if gib is None and named is not None:
        gib = named.memory_gib
    free = available_memory() // here
    if gib is not None:
        host = free if dist.has_gpu() else None
        origin = f"a GPU of {gib:g} GiB ({request.device_name or '--device_memory_gib'})"
        return Device("cuda", int(gib * GIB), host, origin, here, named)
    if dist.has_gpu():
        import torch

        gpu = torch.cuda.get_device_properties(0)
        speed = speed_of(gpu.name, gpu.total_memory)
        return Device("cuda", gpu.total_memory, free, gpu.name, here, speed)
    shared = f", shared by {here} processes" if here > 1 else ""
    return Device("cpu", free, None, f"the memory available on this machine{shared}", here)
