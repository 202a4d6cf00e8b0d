"""Talks to the server as a client that is no library, and waits for what it does."""

import http.client
import json
import socket
import time

FOREVER = {"prompt": "sun", "max_tokens": 400, "stream": True, "ignore_eos": True}


def ask(served, path, body, method="POST", **headers):
    """Status, headers and body of a response."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    data = body if isinstance(body, bytes) else json.dumps(body)
    connection.request(method, path, data, {"Content-Type": "application/json"} | headers)
    response = connection.getresponse()
    text = response.read()
    connection.close()
    return response.status, response.headers, text


def answered(served, body, path="/v1/completions"):
    """The JSON of a response that is well."""
    status, _, text = ask(served, path, body)
    assert status == 200, text
    return json.loads(text)


def send(served, path, body):
    """A socket on which a request was sent, for a response that nobody reads yet."""
    client = socket.create_connection(("127.0.0.1", served.port), timeout=120)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
    client.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + data)
    return client


def begin(served, body):
    """A socket on which a streamed answer has begun."""
    client = send(served, "/v1/completions", body)
    assert client.recv(20).startswith(b"HTTP/1.1 200")
    return client


def num_running(worker):
    """Answers of requests that have their first token."""
    return sum(len(handle.open) for handle in worker._open if not handle.is_waiting)


def wait_until(condition):
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("waited for a minute")
