"""The speeds of named GPUs.

Peak rates are the makers': dense 16-bit tensor FLOPs without sparsity, memory bandwidth, NVLink in
one direction (data sheets give both together), PCIe x16 in one direction. The network and the
host's memory are those of the maker's 8-GPU system, as one GPU's share of it.
"""

from dataclasses import dataclass

from dschat.config import UserError

GB = 1e9
TERA = 1e12


@dataclass(frozen=True)
class DeviceSpeed:
    """What one device can do; rates per second.

    Attributes:
        memory_gib: of the device.
        flops: peak of dense matrix products in 16 bits.
        bandwidth: bytes of device memory.
        link: bytes to the other devices of a node, one direction.
        network: bytes to other nodes, one direction.
        pcie: bytes between device and host, one direction.
        host_bandwidth: bytes of host memory, its share of the node's.
        launch_s: host seconds to issue one operation.
        source: of the figures.
    """

    name: str
    memory_gib: float
    flops: float
    bandwidth: float
    link: float
    network: float
    pcie: float
    host_bandwidth: float
    source: str
    launch_s: float = 5e-6


def _gpu(
    name: str, gib: float, tflops: float, gb_per_s: tuple[float, ...], source: str
) -> DeviceSpeed:
    """``gb_per_s``: memory, link, network, PCIe, host memory of a node of 8."""
    memory, link, network, pcie, host = (rate * GB for rate in gb_per_s)
    return DeviceSpeed(
        name, gib, tflops * TERA, memory, link, network, pcie, host / 8, source=source
    )


_ROWS = (
    # name, GiB, TFLOPs, (memory, link, network, PCIe, host) in GB/s, source
    ("V100-32", 32, 125, (900, 150, 6.25, 16, 153.6), "V100 data sheet 2020; DGX-1"),
    # NVLink joins pairs only: PCIe. No reference system: one 200 Gb/s port for 8.
    ("A6000-48", 48, 154.8, (768, 32, 3.125, 32, 204.8), "RTX A6000 data sheet 2021"),
    ("A100-40", 40, 312, (1555, 300, 25, 32, 409.6), "A100 data sheet 2021; DGX A100"),
    ("A100-80", 80, 312, (2039, 300, 25, 32, 409.6), "A100 data sheet 2021; DGX A100"),
    ("A800-80", 80, 312, (2039, 200, 25, 32, 409.6), "A800 data sheet 2022; as DGX A100"),
    ("H100-80", 80, 989.4, (3350, 450, 50, 64, 614.4), "H100 SXM data sheet 2023; DGX H100"),
    ("H200-141", 141, 989.4, (4800, 450, 50, 64, 614.4), "H200 SXM data sheet 2024; DGX H200"),
)
DEVICES = {row[0]: _gpu(*row) for row in _ROWS}


def find_speed(name: str) -> DeviceSpeed:
    """The device of that name in any case.

    Raises:
        UserError: no such device, with the known names.
    """
    for known, device in DEVICES.items():
        if known.lower() == name.lower():
            return device
    raise UserError(f"--plan_device {name}: no such device; choose from {', '.join(DEVICES)}")


def device_of(gpu_name: str, memory_bytes: int) -> str | None:
    """The table's name for torch's name of a GPU; None if it has no row."""
    words = gpu_name.upper().replace("-", " ").split()
    for name in DEVICES:
        kind, _, gib = name.partition("-")
        is_near = abs(memory_bytes / 2**30 - float(gib)) < 0.15 * float(gib)
        if is_near and any(word.startswith(kind) for word in words):
            return name
    return None
