"""Gives every data test an empty cache, and a function that writes rows to a file."""

import pytest
from data_files import put


@pytest.fixture(autouse=True)
def own_cache(own_cache):
    """In every test."""


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
