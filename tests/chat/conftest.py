"""A tiny tokenizer and checkpoint to chat with; chat.py's functions and what they read."""

import io
import runpy
import signal
from pathlib import Path

import pytest
from python_process import ROOT

from dschat.builtin.tiny_model import materialise_tiny, tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "model"
    materialise_tiny(folder)
    return folder


@pytest.fixture
def script():
    """chat.py's functions by name; the signal handlers that they set do not stay."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGPIPE)}
    yield runpy.run_path(str(ROOT / "chat.py"))
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def typed(monkeypatch):
    """``typed(lines)``: these lines, and their end, are standard input."""
    return lambda lines: monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
