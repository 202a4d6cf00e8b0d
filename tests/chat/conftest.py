"""A tiny tokenizer and checkpoint to chat with."""

from pathlib import Path

import pytest

from dschat.builtin.tiny_model import materialise_tiny, tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "model"
    materialise_tiny(folder)
    return folder
