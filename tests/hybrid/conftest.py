"""DeepSpeed collects garbage for every ZeRO-3 engine: what is imported is no garbage."""

import gc

import pytest


@pytest.fixture(scope="session", autouse=True)
def imports_are_no_garbage():
    import rollout_cases  # noqa: F401

    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
