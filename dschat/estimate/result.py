"""The result of an estimate: bytes by item on one device, in every mode of a step.

NOTE: reading a GPU's memory creates a CUDA context, which takes memory itself; the estimate runs in
a short-lived process.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

import dschat.distributed as dist
from dschat.config import CommonConfig
from dschat.estimate.devices import find_speed
from dschat.memory import available_memory

if TYPE_CHECKING:
    from dschat.estimate.steps import Model

GIB = 2**30

# Memory of a process before any model. CPU: Python with torch, transformers, DeepSpeed and data,
# measured. GPU: an allowance for the CUDA context, cuBLAS and NCCL.
LIBRARIES = {"cpu": 0.5 * GIB, "cuda": 0.75 * GIB}

Items = Counter[str]  # item -> bytes


@dataclass(frozen=True)
class Device:
    """One process's share of a machine: bytes of device and host memory (None: unknown)."""

    kind: str  # cuda or cpu
    memory: int
    host_memory: int | None
    origin: str  # for the report: the device's name, or the flag that gave its memory
    processes_here: int = 1  # that share the host

    @property
    def on_gpu(self) -> bool:
        return self.kind == "cuda"

    @property
    def libraries(self) -> int:
        return int(LIBRARIES[self.kind])


def find_device(
    device_memory_gib: float | None, processes_here: int, device_name: str | None = None
) -> Device:
    """A GPU of ``device_memory_gib``, by default that of ``device_name``; without either this
    machine's GPU, or a process's share of its memory.

    If this machine has no GPU, it is in another machine, whose host memory is unknown.
    """
    if device_memory_gib is None and device_name:
        device_memory_gib = find_speed(device_name).memory_gib
    free = available_memory() // processes_here
    if device_memory_gib is not None:
        host = free if dist.has_gpu() else None
        name = f"a GPU of {device_memory_gib:g} GiB ({device_name or '--device_memory_gib'})"
        return Device("cuda", int(device_memory_gib * GIB), host, name, processes_here)
    if dist.has_gpu():
        properties = torch.cuda.get_device_properties(0)
        return Device("cuda", properties.total_memory, free, properties.name, processes_here)
    shared = f", shared by {processes_here} processes" if processes_here > 1 else ""
    origin = f"the memory available on this machine{shared}"
    return Device("cpu", free, None, origin, processes_here)


@dataclass(frozen=True)
class Mode:
    """Memory of one device at the peak of a mode."""

    name: str
    items: Items
    moment: str = ""  # of the peak, if the mode has several moments

    @property
    def total(self) -> int:
        return self.items.total()


def fullest(name: str, moments: Sequence[tuple[str, Items]]) -> Mode:
    """The mode ``name`` at the moment with the largest total."""
    modes = [Mode(name, items, moment) for moment, items in moments]
    return max(modes, key=lambda mode: mode.total)


@dataclass(frozen=True)
class StepEstimate:
    """Memory of a step on one device. ``host``: bytes of host memory by item; ``present``: the
    models that are loaded, the trained ones first.
    """

    number: int
    config: CommonConfig
    device: Device
    num_processes: int
    models: list[str]  # one line per model
    modes: list[Mode]
    host: Items
    present: Sequence["Model"] = ()

    @property
    def peak(self) -> Mode:
        return max(self.modes, key=lambda mode: mode.total)

    @property
    def fits(self) -> bool:
        """Whether it fits into device and host memory."""
        return self.excess == 0

    @property
    def excess(self) -> int:
        """Bytes that do not fit, of device and host memory together."""
        on_device = max(0, self.peak.total - self.device.memory)
        host_memory = self.device.host_memory
        return on_device + (0 if host_memory is None else max(0, self.host.total() - host_memory))
