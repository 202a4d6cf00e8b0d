"""Makes the tiny models of the inference tests importable."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "inference"))


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
