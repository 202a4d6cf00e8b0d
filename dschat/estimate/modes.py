"""The shape of a plan: what one device holds, item by item, in every mode of a step.

Numbers come in; sums and "does it fit" go out. It must not know how they were found.
"""

from dataclasses import dataclass, field

from dschat.config import CommonConfig
from dschat.estimate.device import Device

Items = dict[str, int]  # what -> bytes


@dataclass
class Mode:
    """What one device holds at the fullest moment of a mode."""

    name: str
    items: Items
    moment: str = ""  # which, where there are several

    @property
    def total(self) -> int:
        return sum(self.items.values())


@dataclass
class StepPlan:
    """A step on one device. ``host``: bytes of host memory beside it, by item."""

    number: int
    config: CommonConfig
    device: Device
    num_processes: int
    models: list[str]  # a line each
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
        """Whether device and host memory hold it."""
        room = self.device.host_memory
        return self.peak.total <= self.device.memory and (room is None or self.host_total <= room)

    @property
    def excess(self) -> int:
        """Bytes that do not fit, of the device and of the host together."""
        over = max(0, self.peak.total - self.device.memory)
        room = self.device.host_memory
        return over + (0 if room is None else max(0, self.host_total - room))


@dataclass
class Holding:
    """What a model holds between passes."""

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
    """The mode ``name`` at that one of its moments at which most is held."""
    modes = [Mode(name, items, moment) for moment, items in moments]
    return max(modes, key=lambda mode: mode.total)
