"""Variables of a launcher."""

import os

import pytest
from python_process import LAUNCHER


@pytest.fixture
def variables(monkeypatch):
    """``variables(RANK="1")``: these variables, and no other of a launcher."""

    def put(**wanted: str) -> None:
        for name in list(os.environ):
            if name in LAUNCHER or name.startswith(("SLURM_", "OMPI_")):
                monkeypatch.delenv(name)
        for name in LAUNCHER:  # so that what the code under test sets is undone
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
        for name, value in wanted.items():
            monkeypatch.setenv(name, value)

    return put
