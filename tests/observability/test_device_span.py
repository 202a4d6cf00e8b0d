"""Seconds of device work, with a clock in place of a CUDA device."""

import time

import pytest
import torch

from dschat.inference.requests.sequence import StepSchedule
from dschat.inference.requests.stats import DeviceSpan, GenerationStats


@pytest.fixture
def gpu(monkeypatch):
    """A device whose work ends where ``gpu[0]``, ms, says; the host waits for it by setting it."""
    now, reached = [0.0], [0.0]

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = now[0]

        def query(self):
            return reached[0] >= self.at

        def synchronize(self):
            reached[0] = max(reached[0], self.at)

        def elapsed_time(self, other):
            assert self.query()
            assert other.query()
            return other.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    return now, reached


def test_on_a_cpu_a_span_is_the_hosts_seconds():
    began = time.perf_counter()
    span = DeviceSpan(torch.device("cpu"))
    for count in (1, 2):  # it may be stopped again
        time.sleep(0.02)
        assert 0.02 * count <= span.stop().seconds() <= time.perf_counter() - began
        assert span.is_over


def test_on_cuda_a_span_is_the_devices_seconds(gpu):
    now, reached = gpu
    span = DeviceSpan(torch.device("cuda"))
    now[0] = 250.0
    span.stop()
    now[0] = 999.0
    assert not span.is_over
    assert span.seconds() == 0.25
    assert span.is_over
    assert reached[0] == 250.0  # not what was queued later


def test_steps_are_counted_where_they_ran_without_waiting(gpu):
    now, reached = gpu
    stats, decode = GenerationStats(), StepSchedule([], [])
    prefill = StepSchedule([], [(None, 7)])
    for schedule, ms in ((prefill, 400.0), (decode, 30.0), (decode, 20.0)):
        span = DeviceSpan(torch.device("cuda"))
        now[0] += ms
        stats.count(schedule, span.stop())
        reached[0] = now[0] - ms  # the device is a step behind
    assert (stats.prefill_s, stats.decode_s) == (0.4, 0.0)
    stats.finish()
    assert (stats.prefill_s, stats.decode_s) == (0.4, pytest.approx(0.05))
