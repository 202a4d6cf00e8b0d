"""Models of the hub without a network."""

import logging
import socket
from urllib.request import getproxies

import pytest
from huggingface_hub import constants

from dschat.config import UserError
from dschat.models import checkpoint_files
from dschat.models.checkpoint import Checkpoint


@pytest.fixture
def network(monkeypatch):
    """``network(error)``: looking up the hub's address raises ``error``, with the hub on."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in getproxies():
        monkeypatch.delenv(f"{name}_proxy", raising=False)
        monkeypatch.delenv(f"{name}_proxy".upper(), raising=False)
    checkpoint_files.has_network.cache_clear()

    def fail(error):
        def look_up(*_):
            raise error

        monkeypatch.setattr(socket, "getaddrinfo", look_up)

    yield fail
    checkpoint_files.has_network.cache_clear()


@pytest.mark.parametrize("part", ["config", "own_tokenizer"])
def test_without_a_network_nothing_is_requested(part, network, caplog):
    network(socket.gaierror("Name or service not known"))
    with caplog.at_level(logging.WARNING), pytest.raises(UserError) as raised:
        getattr(Checkpoint("nobody/nothing", "--model"), part)
    assert [record.name for record in caplog.records] == ["dschat"]  # no retries of the client
    assert "only downloaded models are found" in caplog.text
    assert constants.HF_HUB_OFFLINE
    if part == "config":
        assert str(raised.value).endswith(
            "(only downloaded models are found: no network, or HF_HUB_OFFLINE)"
        )


def test_a_folder_needs_no_network(network, tiny):
    network(AssertionError("looked up"))
    _ = Checkpoint(tiny("llama"), "--model").config
    assert not constants.HF_HUB_OFFLINE


@pytest.mark.parametrize(
    ("variable", "value", "is_off"),
    [("https_proxy", "http://proxy:3128", False), ("no_proxy", "localhost", True)],
)
def test_a_proxy_may_know_the_address(network, monkeypatch, variable, value, is_off):
    network(socket.gaierror("Name or service not known"))
    monkeypatch.setenv(variable, value)
    checkpoint_files.prepare_hub("nobody/nothing")
    assert is_off == constants.HF_HUB_OFFLINE
