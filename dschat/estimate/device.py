"""The device that a plan is for: its kind and memory, and the host memory beside it.

``--device_memory_gib`` or this machine come in; a ``Device`` goes out. Asking for a GPU's memory
makes a CUDA context, which holds some itself: the caller is a process that ends. It must not know
models or steps.
"""

from dataclasses import dataclass

import torch

from dschat.memory import available_memory

GIB = 2**30

# What a process holds before any model: on a CPU Python with torch, transformers, DeepSpeed and its
# data, as measured; on a GPU an allowance for the CUDA context, cuBLAS and NCCL.
LIBRARIES = {"cpu": 0.5 * GIB, "cuda": 0.75 * GIB}


@dataclass(frozen=True)
class Device:
    """One process's share: bytes of device memory, and of host memory (None: unknown)."""

    kind: str  # cuda or cpu
    memory: int
    host_memory: int | None
    origin: str  # how the memory is known
    processes_here: int = 1  # that share the host

    @property
    def on_gpu(self) -> bool:
        return self.kind == "cuda"

    @property
    def libraries(self) -> int:
        return int(LIBRARIES[self.kind])


def find_device(device_memory_gib: float | None, processes_here: int) -> Device:
    """A GPU of ``device_memory_gib``; else this machine's GPU, or its share of a CPU's memory.

    A GPU that is asked for where there is none is in another machine, of unknown host memory.
    """
    free: int | None = available_memory() // processes_here
    if device_memory_gib is not None:
        free = free if torch.cuda.is_available() else None
        name = f"a GPU of {device_memory_gib:g} GiB (--device_memory_gib)"
        return Device("cuda", int(device_memory_gib * GIB), free, name, processes_here)
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        return Device("cuda", properties.total_memory, free, properties.name, processes_here)
    shared = f", shared by {processes_here} processes" if processes_here > 1 else ""
    return Device(
        "cpu", free, None, f"the memory available on this machine{shared}", processes_here
    )
