"""CUDA captures: one stream and pool, nothing waits, and nothing is left of one that failed.

The driver is a record of its calls, so no GPU is needed.
"""

import gc
from contextlib import contextmanager
from weakref import WeakSet

import pytest
import torch
from captures import captured_by
from families import empty_engine, engine

from dschat.config import UserError
from dschat.inference import EngineConfig, SamplingParams
from dschat.inference.requests.cuda_graphs import CudaCapture, capture_stream

PROMPTS = [[5, 6, 7], [8] * 9]
SAMPLING = SamplingParams(max_new_tokens=9, seed=4)


class Driver:
    """Stands for torch.cuda. ``invalidates``: so many captures end as ones that CUDA has broken."""

    def __init__(self, monkeypatch):
        self.calls, self.streams, self.pools = [], 0, 0
        self.graphs = {}  # alive, by pool
        self.capturing, self.invalidates, self.on_stream = None, 0, "main"
        self.draws_for = None  # the capture that the default generator draws for
        driver = self

        class Stream:
            def __init__(self):
                driver.streams += 1
                self.name = f"side {driver.streams}"

            def wait_stream(self, other):
                driver.calls.append(f"{self.name} waits for {other.name}")

        class Graph:
            def capture_begin(self, pool, capture_error_mode):
                assert driver.capturing is None
                if pool in driver.graphs and not driver.graphs[pool]:
                    raise RuntimeError("use_count > 0")  # torch: of a pool that lost its graphs
                driver.graphs.setdefault(pool, WeakSet()).add(self)
                assert driver.on_stream != "main"
                driver.capturing = driver.draws_for = self
                driver.calls.append(f"begin {pool} {capture_error_mode}")

            def capture_end(self):
                if driver.capturing is not self:
                    raise RuntimeError("no capture")
                driver.capturing = None
                driver.calls.append("end")
                if driver.invalidates:
                    driver.invalidates -= 1
                    raise RuntimeError("capture invalidated")
                driver.draws_for = None

            def reset(self):
                driver.calls.append("reset")

            def replay(self):
                driver.calls.append("replay")

        main = Stream()
        main.name, self.streams = "main", 0

        @contextmanager
        def stream(target):
            before, driver.on_stream = driver.on_stream, target.name
            try:
                yield
            finally:
                driver.on_stream = before

        def called(name):
            return lambda *args: driver.calls.append(name)

        def new_pool():
            driver.pools += 1
            return f"pool {driver.pools}"

        for name, fake in {
            "Stream": Stream,
            "CUDAGraph": Graph,
            "current_stream": lambda: main,
            "stream": stream,
            "graph_pool_handle": new_pool,
            "current_device": lambda: 0,
            "synchronize": called("synchronize"),
            "empty_cache": called("empty_cache"),
        }.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
            monkeypatch.setattr(torch._C, name, called(name))


@pytest.fixture
def driver(monkeypatch):
    capture_stream.cache_clear()
    yield Driver(monkeypatch)
    capture_stream.cache_clear()


def number_of_runs(capture, fails=()):
    """Captures a step that raises in its runs of these numbers; returns how often it ran."""
    runs = []

    def step():
        runs.append(len(runs))
        if runs[-1] in fails:
            raise RuntimeError("operation not permitted\nmore")
        return torch.zeros(1)

    capture(step)
    return len(runs)


def test_captures_share_stream_and_pool_and_wait_for_nothing(driver):
    """A pool outlives its graphs, which are dropped here. Other engines have the same stream."""
    for pool in ("pool 1", "pool 2"):
        capture = CudaCapture(required=True)
        for _ in range(3):
            driver.calls.clear()
            assert number_of_runs(capture) == 2  # the first one warms up
            assert driver.calls == [
                "side 1 waits for main",
                f"begin {pool} thread_local",
                "end",
                "main waits for side 1",
            ]
            gc.collect()


@pytest.mark.parametrize("invalidates", [0, 1])
@pytest.mark.parametrize("fails", [0, 1])
def test_a_failed_capture_leaves_nothing_behind(driver, fails, invalidates):
    capture = CudaCapture(required=False)
    driver.invalidates = invalidates
    with pytest.raises(RuntimeError, match="operation not permitted"):
        number_of_runs(capture, fails={fails})
    assert driver.capturing is driver.draws_for is None
    assert driver.on_stream == "main"
    assert driver.calls[-1] == "main waits for side 1"
    # The warm-up run is not captured. After a capture that failed, an empty one ends well.
    assert driver.calls.count("end") == 2 * fails
    broken = bool(fails and invalidates)
    num_alive = sum(map(len, driver.graphs.values()))  # the allocator may refer to such a one
    assert driver.calls.count("_cuda_endAllocateToPool") == num_alive == broken
    assert driver.calls.count("reset") == (fails and not invalidates)
    driver.invalidates = 0
    assert number_of_runs(capture) == 2
    assert driver.streams == 1
    # What may refer to the failed graph is not used again.
    assert f"begin pool {1 + 2 * fails} thread_local" in driver.calls[-3:]


@pytest.mark.parametrize("invalidates", [0, 1])
def test_a_pool_with_graphs_is_used_on_after_a_failure_that_leaves_it_sound(driver, invalidates):
    capture = CudaCapture(required=False)
    number_of_runs(capture)
    driver.invalidates = invalidates
    with pytest.raises(RuntimeError):
        number_of_runs(capture, fails={1})
    number_of_runs(capture)
    assert f"begin pool {3 if invalidates else 1} thread_local" in driver.calls[-3:]


def test_a_capture_without_memory_is_tried_again_after_emptying_the_cache(driver):
    runs = []

    def step():
        runs.append(driver.calls.count("empty_cache"))
        if driver.capturing and not runs[-1]:
            raise torch.OutOfMemoryError("CUDA out of memory")

    CudaCapture(required=True)(step)
    assert runs == [0, 0, 1]
    assert driver.calls[-2:] == ["end", "main waits for side 1"]


def test_a_capture_that_never_has_memory_fails(driver):
    def step():
        if driver.capturing:
            raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(UserError, match="CUDA out of memory"):
        CudaCapture(required=True)(step)
    assert driver.calls.count("empty_cache") == 1
    assert driver.draws_for is None


def test_a_capture_that_ends_broken_has_failed(driver):
    driver.invalidates = 1
    with pytest.raises(RuntimeError, match="invalidated"):
        number_of_runs(CudaCapture(required=False))
    assert driver.capturing is driver.draws_for is None


def test_graphs_that_were_demanded_fail_with_one_line(driver, module_of):
    made = captured_by(engine(module_of("llama")), CudaCapture(required=True))
    driver.invalidates = 3  # a prompt, which goes on eagerly, the empty capture after it, a step
    with pytest.raises(UserError, match="cuda_graphs: a step cannot be captured: ") as error:
        made.generate(PROMPTS, SAMPLING)
    assert "\n" not in str(error.value)
    captured_by(made, None)  # eager: the cache is as free as it was
    expected = engine(module_of("llama")).generate(PROMPTS, SAMPLING)
    assert made.generate(PROMPTS, SAMPLING) == expected


def test_who_gets_graphs(module_of):
    for wanted, has_graphs in ((None, True), (True, True), (False, False)):
        assert EngineConfig(cuda_graphs=wanted).captures(on_gpu=True) == has_graphs
    for wanted in (None, False):
        assert not empty_engine(module_of("llama").config, cuda_graphs=wanted).captures
    with pytest.raises(UserError, match="cuda_graphs needs a CUDA device; this one is a cpu"):
        empty_engine(module_of("llama").config, cuda_graphs=True)
