"""The result of an estimate: bytes by item on one device, in every mode of a step."""

from dataclasses import dataclass, field

from dschat.config import CommonConfig
from dschat.estimate.device import Device

Items = dict[str, int]  # item -> bytes


@dataclass
class Mode:
    """Memory of one device at the peak of a mode."""

    name: str
    items: Items
    moment: str = ""  # of the peak, if the mode has several moments

    @property
    def total(self) -> int:
        return sum(self.items.values())


@dataclass
class StepEstimate:
    """Memory of a step on one device. ``host``: bytes of host memory by item."""

    number: int
    config: CommonConfig
    device: Device
    num_processes: int
    models: list[str]  # one line per model
    modes: list[Mode]
    host: Items = field(default_factory=dict)

    @property
    def peak(self) -> Mode:
        return max(self.modes, key=lambda mode: mode.total)

    @property
    def host_total(self) -> int:
        return sum(self.host.values())

    @property
    def fits(self) -> bool:
        """Whether it fits into device and host memory."""
        return self.excess == 0

    @property
    def excess(self) -> int:
        """Bytes that do not fit, of device and host memory together."""
        on_device = max(0, self.peak.total - self.device.memory)
        host_memory = self.device.host_memory
        return on_device + (0 if host_memory is None else max(0, self.host_total - host_memory))


@dataclass
class Holding:
    """Memory of a model between passes, by item."""

    device: Items = field(default_factory=dict)
    host: Items = field(default_factory=dict)

    def __add__(self, other: "Holding") -> "Holding":
        return Holding(summed(self.device, other.device), summed(self.host, other.host))


def summed(*parts: Items) -> Items:
    """Item by item."""
    total: Items = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0) + value
    return total


def fullest(name: str, moments: list[tuple[str, Items]]) -> Mode:
    """The mode ``name`` at the moment with the largest total."""
    modes = [Mode(name, items, moment) for moment, items in moments]
    return max(modes, key=lambda mode: mode.total)
