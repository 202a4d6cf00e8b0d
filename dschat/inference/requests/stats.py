"""Counts tokens, seconds and cache use of one call of `generate`.

Seconds are the device's, by CUDA events: a GPU runs behind the host, whose clock would
charge its work to whatever waits for it next.
"""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from dschat.inference.requests.sequence import StepSchedule


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


@dataclass
class GenerationStats:
    """Statistics of one call of `generate`, over all prompts of the tensor-parallel group.

    A step with prompt tokens counts as prefill, including the sequences that decode in it; any
    other step counts as decode.
    """

    prompts: int = 0
    prefill_tokens: int = 0
    cached_tokens: int = 0  # of prompts, found in the cache
    prefill_steps: int = 0
    prefill_s: float = 0.0
    decode_tokens: int = 0
    decode_steps: int = 0
    decoded_rows: int = 0  # of decode steps; equal answers to a prompt share one
    decode_s: float = 0.0
    answer_tokens: int = 0
    preemptions: int = 0
    peak_pages: int = 0
    num_pages: int = 0
    max_num_seqs: int = 0
    _unread: deque[tuple[bool, DeviceSpan]] = field(default_factory=deque, repr=False)

    @property
    def prefill_tokens_per_s(self) -> float:
        return self.prefill_tokens / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        return self.decode_tokens / self.decode_s if self.decode_s else 0.0

    @property
    def occupancy(self) -> float:
        """Mean share of ``max_num_seqs`` that decoded in a decode step."""
        slots = self.decode_steps * self.max_num_seqs
        return self.decoded_rows / slots if slots else 0.0

    @property
    def cache_use(self) -> float:
        """Peak share of the pages in use."""
        return self.peak_pages / self.num_pages if self.num_pages else 0.0

    def count(self, schedule: StepSchedule, span: DeviceSpan) -> None:
        """Add a step that took ``span``, before its tokens are appended."""
        # The last token of a prompt may be among the decoding rows.
        self.prefill_tokens += sum(not s.answer for s in schedule.decodes)
        if schedule.chunks:
            self.prefill_tokens += sum(count for _, count in schedule.chunks)
            self.prefill_steps += 1
        else:
            self.decoded_rows += len(schedule.decodes)
            self.decode_steps += 1
        self.add_seconds(bool(schedule.chunks), span)

    def count_draws(self, is_prefill: bool, num_drawn: int) -> None:
        """Add a step's tokens of answers."""
        self.answer_tokens += num_drawn
        if not is_prefill:
            self.decode_tokens += num_drawn

    def finish(self) -> None:
        """Add the seconds of all steps; waits for the device."""
        while self._unread:
            self._read()

    def add_seconds(self, is_prefill: bool, span: DeviceSpan) -> None:
        """Add the time of steps, as soon as it can be read without waiting."""
        self._unread.append((is_prefill, span))
        while self._unread and self._unread[0][1].is_over:
            self._read()

    def _read(self) -> None:
        is_prefill, span = self._unread.popleft()
        if is_prefill:
            self.prefill_s += span.seconds()
        else:
            self.decode_s += span.seconds()
