"""Makes the module `families` importable; builds each model once per worker."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def interpreted():
    """A `triton_worker.Worker` that interprets kernels."""
    for worker in _worker(interpret=True):
        try:
            assert worker("counts_to", 3) == 3
        except RuntimeError as error:
            if "only 0-dimensional arrays" not in str(error):
                raise
            pytest.skip("the interpreter of Triton 3.6 needs NumPy before 2.4")
        yield worker


@pytest.fixture(scope="session")
def compiling():
    """A `triton_worker.Worker` that compiles kernels."""
    yield from _worker(interpret=False)


def _worker(interpret):
    from triton_worker import HAS_TRITON, REASON, Worker

    if not HAS_TRITON:
        pytest.skip(REASON)
    worker = Worker(interpret)
    yield worker
    worker.close()


@pytest.fixture
def threads():
    """``threads(count)`` sets how many torch has, until the test ends."""
    import torch

    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def operators_of_torch():
    """Traced steps do not see our CPU kernels."""
    from soft_graph import operators_only

    with operators_only():
        yield


@pytest.fixture(scope="module")
def engines(module_of, operators_of_torch):
    """``engines(name, **knobs)``: an engine that decodes step by step, and one with graphs."""
    from captures import again, captured_by, on_graphs
    from families import engine

    made = {}

    def get(name, capture=again, **knobs):
        key = name, *knobs.items()
        if key not in made:
            made[key] = engine(module_of(name), **knobs), on_graphs(module_of(name), **knobs)
        plain, graphs = made[key]
        graphs.release_cache()  # the next rollout makes graphs with the present stand-ins
        return plain, captured_by(graphs, capture)

    return get
