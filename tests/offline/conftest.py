"""Tiny checkpoints and data files to generate from and to evaluate on."""

import json
from pathlib import Path

import pytest
import tiny_models


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Path:
    """A folder of checkpoints: two models, and two reward models, one with other token ids."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("llama", "opt", "llama_reward", "llama_reward_reversed"):
        tiny_models.ensure(folder, name)
    return folder


@pytest.fixture
def write(tmp_path):
    """Writes rows as JSON lines; returns the path."""

    def write(name: str, rows: list[dict]) -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


@pytest.fixture
def prompts(write) -> str:
    """Ten prompts of different lengths, with columns of their own."""
    rows = [
        {"id": i, "prompt": " ".join(f"w{2 + (3 * i + j) % 60}" for j in range(1 + i % 4))}
        for i in range(10)
    ]
    return write("prompts.jsonl", [row | {"tags": [None, 0.5]} for row in rows])
