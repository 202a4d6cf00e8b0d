"""Makes the module `families` importable; builds each model once per worker."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def module_of():
    """``module_of("llama")``: that family's tiny module, shared, so never to be changed."""
    import families

    made = {}

    def get(name):
        if name not in made:
            made[name] = families.build(name)
        return made[name]

    return get


@pytest.fixture(scope="session")
def interpreted():
    """A `triton_worker.Worker` that interprets kernels."""
    yield from _worker(interpret=True)


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
