"""Connections that send no request, and answers that run when the server is stopped."""

import http.client
import json
import re
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import forked
import pytest
from http_client import FOREVER, answered, send, wait_until
from quick import each_once, slow

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


@pytest.mark.parametrize(
    ("first", "drip"), each_once([b"", HEAD, HEAD + b"\r\n"], [b"", b"x", b"\r\n"])
)
def test_headers_that_do_not_arrive(first, drip, start):
    """At the start of a connection, within a header, and after a first request."""
    if drip == b"\r\n" and first == HEAD:
        pytest.skip("ends the headers")
    with opened(start(limits={"header_timeout_s": 0.15})) as client:
        client.sendall(first)
        assert is_ended(client, drip)


def test_a_long_answer_is_not_cut_by_the_limit_on_headers(start):
    served = start(limits={"header_timeout_s": 0.01})
    assert answered(served, FOREVER | {"stream": False})["usage"]["completion_tokens"] == 400


def test_headers_without_end(start):
    """By their size, long before their time."""
    with opened(start(limits={"header_timeout_s": 1000.0})) as client:
        client.sendall(HEAD + b"x: " + b"y" * 64 * 2**10)
        assert is_ended(client)


def test_more_connections_than_are_allowed(start):
    served = start(limits={"max_connections": 3})
    clients = [opened(served) for _ in range(3)]
    with opened(served) as another:
        assert is_ended(another)
    for client in clients:
        client.sendall(HEAD + b"\r\n")
        assert client.recv(15) == b"HTTP/1.1 200 OK"
        client.close()


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
@pytest.mark.parametrize("cut", [0, 200, -5])
def test_an_offer_of_another_protocol(protocol, cut, served):
    """As Java's client makes one with its first request: it is answered by HTTP/1.1, and so is the
    next one. ``cut``: where the request is split.
    """
    body = b'{"prompt": "sun", "max_tokens": 2}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nUpgrade: {protocol}\r\n"
    head += "Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABk\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    request = head.encode() + body
    with opened(served) as client:
        for _ in range(2):
            client.sendall(request[:cut])
            time.sleep(0.05)
            client.sendall(request[cut:])
            response = http.client.HTTPResponse(client)
            response.begin()
            assert response.status == 200
            assert json.loads(response.read())["usage"]["completion_tokens"] <= 2


def test_an_offer_in_http_1_0(served):
    """The parser reads nothing after it."""
    with opened(served) as client:
        client.settimeout(30)
        client.sendall(b"GET /health HTTP/1.0\r\nHost: localhost\r\nUpgrade: h2c\r\n")
        client.sendall(b"Connection: Upgrade\r\n\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 200")


STOPS = [(60, signal.SIGHUP), *slow([(0, signal.SIGTERM), (60, signal.SIGTERM)])]


@pytest.mark.parametrize(("drain_s", "signum"), [*STOPS, *slow([(60, signal.SIGUSR1)])])
def test_answers_that_run_when_the_server_is_stopped(drain_s, signum, tmp_path):
    """They end within --drain_s, or with an error; the process exits with code 0."""
    argv = ["-m", "dschat", "serve", "--path", "tiny=builtin/tiny", "--port", "0"]
    argv += ["--max_num_seqs", "4", "--drain_s", str(drain_s)]
    command = forked.Command(argv, signum, after_file="asked")
    printed = tmp_path / "runs/0/stdout"
    forked.run("-c", "")  # NOTE: the forks' server dies with the thread that starts it
    with ThreadPoolExecutor(7) as pool:
        stopped = pool.submit(forked.run_all, tmp_path, None, [command])
        wait_until(lambda: printed.exists() and printed.read_text().endswith("\n"))
        server = SimpleNamespace(port=int(re.search(r":(\d+) \(", printed.read_text())[1]))
        bodies = [FOREVER | {"stream": i % 3 > 0} for i in range(6)]
        clients = [send(server, "/v1/completions", body) for body in bodies]
        assert clients[1].recv(15) == b"HTTP/1.1 200 OK"
        received = [pool.submit(whole_response, client) for client in clients]
        (tmp_path / "runs/0/work/asked").write_text("all of them")
        (outcome,) = stopped.result()
    said = outcome.stderr
    assert (outcome.code, "Traceback" in said) == (0, False), said
    for i, text in enumerate(future.result() for future in received):
        is_whole = b'"finish_reason":"length"' in text
        assert is_whole or (not drain_s and b"the server stops" in text), text[-300:]
        if i % 3:
            assert text.count(b"data: [DONE]") == 1
        else:
            assert text.startswith(b"HTTP/1.1 200" if is_whole else b"HTTP/1.1 503")


def whole_response(client):
    with client:
        return b"".join(iter(lambda: client.recv(65536), b""))
