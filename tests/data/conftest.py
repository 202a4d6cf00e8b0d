"""Gives every data test an empty cache, a function that writes rows to a file, and a stand-in of
the hub.
"""

import logging

import datasets
import pytest
from data_files import put
from datasets import Dataset, DatasetDict


@pytest.fixture(autouse=True)
def own_cache(own_cache):
    """In every test."""


@pytest.fixture
def in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def log(caplog):
    """The log from level INFO."""
    caplog.set_level(logging.INFO, "dschat")
    return caplog


@pytest.fixture
def write(tmp_path):
    """Write rows (or raw text or bytes) to a file and return its path."""

    def write_rows(rows, name="data.jsonl"):
        path = tmp_path / name
        if isinstance(rows, list):
            return put(path, rows)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(rows if isinstance(rows, bytes) else rows.encode())
        return str(path)

    return write_rows


class Hub:
    """Stands in for ``datasets.load_dataset``: gives ``splits`` (name -> rows) for any name.

    ``has_script``: refuses, as for a data set with a script, unless a revision is asked for.
    """

    def __init__(self):
        self.splits, self.has_script, self.calls = {}, False, []

    def __call__(self, name, config_name=None, **knobs):
        self.calls.append((name, config_name, knobs.get("revision")))
        if self.has_script and "revision" not in knobs:
            raise RuntimeError("Dataset scripts are no longer supported, but found x.py")
        tables = {name: Dataset.from_list(rows) for name, rows in self.splits.items()}
        return DatasetDict(tables)


@pytest.fixture
def hub(monkeypatch):
    made = Hub()
    monkeypatch.setattr(datasets, "load_dataset", made)
    return made
