"""Connections that send no request, and answers that run when the server is stopped."""

import collections
import json
import re
import signal
import socket
import subprocess
import sys
import threading

import pytest
from http_client import FOREVER, ask

pytest.importorskip("uvicorn")
from dschat.serving import limits  # noqa: E402

HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"


def opened(served):
    return socket.create_connection(("127.0.0.1", served.port), timeout=30)


def is_ended(client, drip=b""):
    """Whether the server ends the connection while bytes still come."""
    client.settimeout(0.05)
    for _ in range(600):
        try:
            client.sendall(drip)
            if not client.recv(1000):
                return True
        except TimeoutError:
            continue
        except OSError:
            return True
    return False


@pytest.mark.parametrize("first", [b"", HEAD, HEAD + b"\r\n"])
@pytest.mark.parametrize("drip", [b"", b"x", b"\r\n"])
def test_headers_that_do_not_arrive(first, drip, served, monkeypatch):
    """At the start of a connection, within a header, and after a first request."""
    if drip == b"\r\n" and first == HEAD:
        pytest.skip("ends the headers")
    monkeypatch.setattr(limits, "_HEADER_TIMEOUT_S", 0.3)
    with opened(served) as client:
        client.sendall(first)
        assert is_ended(client, drip)


def test_a_long_answer_is_not_cut_by_the_limit_on_headers(served, monkeypatch):
    monkeypatch.setattr(limits, "_HEADER_TIMEOUT_S", 0.01)
    status, _, text = ask(served, "/v1/completions", FOREVER | {"stream": False})
    assert (status, json.loads(text)["usage"]["completion_tokens"]) == (200, 400)


def test_headers_without_end(served):
    with opened(served) as client:
        client.sendall(HEAD + b"x: " + b"y" * limits._HEADER_BYTES)
        assert is_ended(client)


def test_more_connections_than_are_allowed(served, monkeypatch):
    monkeypatch.setattr(limits, "_MAX_CONNECTIONS", 3)
    clients = [opened(served) for _ in range(3)]
    with opened(served) as another:
        assert is_ended(another)
    for client in clients:
        client.sendall(HEAD + b"\r\n")
        assert client.recv(15) == b"HTTP/1.1 200 OK"
        client.close()


@pytest.mark.parametrize("drain_s", [0, 60])
def test_answers_that_run_when_the_server_is_stopped(drain_s):
    """They end within --drain_s, or with an error; the process exits with code 0."""
    command = [sys.executable, "-m", "dschat", "serve", "--path", "tiny=builtin/tiny", "--port"]
    options = ["0", "--max_num_seqs", "4", "--drain_s", str(drain_s)]
    with subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        port = int(re.search(r":(\d+) \(", process.stdout.readline())[1])
        clients = [socket.create_connection(("127.0.0.1", port), timeout=120) for _ in range(12)]
        for i, client in enumerate(clients):
            data = json.dumps(FOREVER | {"stream": i % 3 > 0}).encode()
            head = f"Host: localhost\r\nContent-Length: {len(data)}\r\n"
            head += "Content-Type: application/json\r\n\r\n"
            client.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}".encode() + data)
        assert clients[1].recv(15) == b"HTTP/1.1 200 OK"
        received = collections.defaultdict(bytes)

        def read(i):
            while part := clients[i].recv(65536):
                received[i] += part

        threads = [threading.Thread(target=read, args=(i,)) for i in range(12)]
        for thread in threads:
            thread.start()
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=120)
        for thread, client in zip(threads, clients, strict=True):
            thread.join(30)
            client.close()
    assert (process.returncode, "Traceback" in said) == (0, False), said
    for i, text in sorted(received.items()):
        is_whole = b'"finish_reason":"length"' in text
        assert is_whole or (not drain_s and b"the server stops" in text), text[-300:]
        if i % 3:
            assert text.count(b"data: [DONE]") == 1
        else:
            assert text.startswith(b"HTTP/1.1 200" if is_whole else b"HTTP/1.1 503")
    assert len(received) == 12
