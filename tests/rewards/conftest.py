"""Samples, an HTTP server, and reward functions that are closed after a test."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from others_rewards import FILE

from dschat.config import RLHFConfig
from dschat.rewards import endpoint
from dschat.rewards.reward_functions import RewardFunctions
from dschat.rewards.samples import Samples


@pytest.fixture
def samples():
    """``samples(n)``: n samples, two per prompt; answer ai has i % 3 + 1 tokens."""

    def make(n: int, **columns: list) -> Samples:
        return Samples(
            prompts=[f"p{i // 2}" for i in range(n)],
            answers=[f"a{i}" for i in range(n)],
            prompt_ids=[[i // 2] for i in range(n)],
            answer_ids=[list(range(i % 3 + 1)) for i in range(n)],
            finish_reasons=["stop" if i % 2 else "length" for i in range(n)],
            columns=columns,
        )

    return make


@pytest.fixture
def rewards():
    """``rewards([functions], flag=value)``: `RewardFunctions` that live as long as the test."""
    made = []

    def make(functions=(), **flags) -> RewardFunctions:
        made.append(RewardFunctions(RLHFConfig(**flags), functions))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def others(tmp_path, monkeypatch):
    """A file of reward functions of other trainers, in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "others.py").write_text(FILE)
    return "others.py"


class Server:
    """Answers the content of each POST with ``reply(content, number of the request)``: a body, or
    a status and a body; a body is bytes or becomes JSON.
    """

    def __init__(self):
        self.reply = lambda content, number: {}
        self.requests, self.times, self.headers, self.paths = [], [], [], []
        self.location = ""  # of a redirect
        self.running = self.most_running = self.meet = 0
        lock, server = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    number = len(server.requests)
                    server.requests.append(content)
                    server.times.append(time.monotonic())
                    server.headers.append(self.headers)
                    server.paths.append(self.path)
                    server.running += 1
                    server.most_running = max(server.most_running, server.running)
                latest = time.monotonic() + 30
                while server.most_running < server.meet and time.monotonic() < latest:
                    time.sleep(0.005)
                reply = server.reply(content, number)
                with lock:
                    server.running -= 1
                status, body = reply if isinstance(reply, tuple) else (200, reply)
                raw = body if isinstance(body, bytes) else json.dumps(body).encode()
                try:
                    self.send_response(status)
                    if server.location:
                        self.send_header("Location", server.location)
                    self.send_header("Content-Length", str(len(raw)))
                    self.end_headers()
                    self.wfile.write(raw)
                except OSError:  # it did not wait for us
                    pass

            def do_GET(self):
                server.requests.append("GET")

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def servers(monkeypatch):
    """``servers()``: a `Server` that lives as long as the test; retries come soon."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(endpoint, "_FIRST_PAUSE_S", 0.05)
    made = []

    def make():
        made.append(Server())
        return made[-1]

    yield make
    for server in made:
        server.close()
