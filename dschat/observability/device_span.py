"""Measures how long a stretch of work takes on its device: by CUDA events, else the host's clock.

A GPU runs behind the host, whose clock would charge its work to whatever waits for it next.
"""

import time
from typing import Any

import torch


class DeviceSpan:
    """A stretch of work on ``device``, which begins when this is made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin = self._end = self._mark()

    def stop(self) -> "DeviceSpan":
        """End the stretch here. Does not wait for the device."""
        self._end = self._mark()
        return self

    @property
    def is_over(self) -> bool:
        """Whether the device has come to the end, so that `seconds` does not wait."""
        return isinstance(self._end, float) or self._end.query()

    def seconds(self) -> float:
        """Seconds from begin to end, while the device was idle included; waits for the end."""
        if isinstance(self._end, float):
            return self._end - self._begin
        self._end.synchronize()
        return self._begin.elapsed_time(self._end) / 1e3

    def _mark(self) -> Any:
        """The host's seconds, or a CUDA event."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
