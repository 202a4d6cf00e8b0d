"""The function http and a local endpoint: requests, retries, every kind of invalid reply."""

import contextlib
import socket
import threading
import time

import psutil
import pytest

from dschat.config import UserError
from dschat.rewards import endpoint
from dschat.rewards.scoring import RewardError
from dschat.user_code.calls import Fault


def right(content, number=0):
    return {"rewards": [float(answer[1:]) for answer in content["answers"]]}


@pytest.fixture
def server(servers):
    one = servers()
    one.reply = right
    return one


@pytest.fixture
def ask(server, rewards, samples):
    """``ask(n)``: the endpoint's scores of n samples."""

    def finish(n, columns=None, weight=1.0, on_reward_error="error", **arguments):
        given = {"url": f"{server.url}/score"} | arguments
        flags = {"reward_args": [f"http.{name}={value}" for name, value in given.items()]}
        flags |= {"reward_pool": "thread", "reward_workers": 3, "on_reward_error": on_reward_error}
        asked = rewards(reward_fn=[f"http:{weight}"], **flags)
        return asked.score(samples(n, **(columns or {}))).result()[0]

    return finish


def in_turn(*replies):
    """The last of them repeats; None: the right one; a number: that after so many seconds."""

    def reply(content, number):
        chosen = replies[min(number, len(replies) - 1)]
        if isinstance(chosen, float):
            time.sleep(chosen)
            chosen = None
        return right(content) if chosen is None else chosen

    return reply


def test_a_call_is_a_request_and_those_of_a_pool_run_side_by_side(server, ask):
    server.meet = 3
    source = ask(12, {"tests": list(range(12))}, weight=2.0)
    assert (source.name, source.weight) == ("http", 2)
    assert source.scores.tolist() == list(range(12))
    batches = sorted(server.requests, key=lambda content: content["tests"])
    assert batches == [
        {
            "prompts": [f"p{i // 2}" for i in rows],
            "answers": [f"a{i}" for i in rows],
            "finish_reasons": ["stop" if i % 2 else "length" for i in rows],
            "prompt_messages": [f"p{i // 2}" for i in rows],
            "tests": list(rows),
        }
        for rows in (range(4), range(4, 8), range(8, 12))
    ]
    assert server.most_running == 3


@pytest.mark.parametrize(
    "body", [[1, 0.5], {"scores": [1, 0.5]}, {"rewards": [1, 0.5], "scores": [7, 7]}]
)
def test_accepted_forms_of_the_reply(server, ask, body):
    server.reply = in_turn(body)
    assert ask(2).scores.tolist() == [1, 0.5]


def test_numbers_by_token_and_null(server, ask):
    server.reply = in_turn({"rewards": [None, [0.5, 1.0]]})  # of 1 and 2 tokens
    source = ask(2)
    assert source.scores.tolist() == [0, 1.5]
    assert source.token_scores == [[], [0.5, 1]]
    assert source.applies.tolist() == [False, True]


def test_a_transient_failure_is_retried_after_growing_pauses(server, ask):
    server.reply = in_turn((503, b""), (429, b""), None)
    assert ask(2).scores.tolist() == [0, 1]
    first, second, third = server.times
    assert second - first >= 0.05
    assert third - second >= 0.1


@pytest.mark.parametrize("status", [408, 425])
def test_a_request_that_came_too_late_or_early_is_retried(status, server, ask):
    server.reply = in_turn((status, b""), None)
    assert ask(1).scores.tolist() == [0]


def test_an_endpoint_that_refuses_connections(server, ask):
    server.url = "http://127.0.0.1:1"
    with pytest.raises(RewardError, match=r"cannot be reached: .*refused \(2 times\)"):
        ask(1, retries=1)


@pytest.mark.parametrize(
    ("reply", "requests", "words"),
    [
        ((500, b"Traceback"), 3, r"answered 500 Internal Server Error \(3 times\)"),
        (1.5, 3, r"did not answer within 0.2 s \(3 times\); raise http.timeout_s on"),
        ((404, b""), 1, "answered 404 Not Found"),
        ((200, b"<html>oops"), 1, r"answered with invalid JSON \('<html>oops'\)"),
        ((200, b""), 1, r"answered with invalid JSON \(''\)"),
        ((200, {"reward": [1]}), 1, 'got a reply without a list "rewards" from http'),
        ((200, 3), 1, 'got a reply without a list "rewards" from http'),
        ((200, [1.0]), 1, "returned 1 values for 2 samples"),
        ((200, [1.0, "good"]), 1, "returned 'good', not a number"),
        ((200, [1.0, float("nan")]), 1, "returned nan"),
        ((200, [1.0, [1.0]]), 1, "returned 1 values for an answer of 2 tokens"),
    ],
)
def test_an_endpoint_that_fails_is_one_line(server, ask, reply, requests, words):
    server.reply = in_turn(reply)
    with pytest.raises(RewardError, match=words) as caught:
        ask(2, retries=2, timeout_s=0.2 if reply == 1.5 else 60.0)
    line = str(caught.value)
    assert line.startswith("--reward_fn http:1.0 ")
    assert "on the prompt 'p0'" in line or "the first on the prompt 'p0'" in line
    assert line.endswith("fix it, or pass --on_reward_error skip")
    assert len(line.splitlines()) == 1
    assert len(server.requests) == requests


def test_an_error_status_leaves_no_connection_open(server, ask):
    server.reply = in_turn((500, b"Traceback"))
    with pytest.raises(RewardError):
        ask(1, retries=1)
    others = {found.raddr for found in psutil.Process().net_connections("tcp")}
    assert not [address for address in others if address and server.url.endswith(f":{address[1]}")]


def test_headers_that_trickle_in_do_not_stretch_the_limit(server, ask):
    """Each header arrives in time, but they never end; the client rejects the 101st."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server.url = f"http://127.0.0.1:{listening.getsockname()[1]}"

        def trickle():
            connection, _ = listening.accept()
            with connection, contextlib.suppress(OSError):  # it did not wait for us
                connection.sendall(b"HTTP/1.0 200 OK\r\n")
                for _ in range(200):
                    connection.sendall(b"X-Slow: yes\r\n")
                    time.sleep(0.05)

        threading.Thread(target=trickle, daemon=True).start()
        with pytest.raises(RewardError, match=r"did not answer within 0.3 s \(once\)"):
            ask(1, retries=0, timeout_s=0.3)


@pytest.mark.parametrize("status", ["200 OK", "404 Not Found"])
def test_an_endless_reply_is_bounded_and_not_asked_again(server, ask, monkeypatch, status):
    monkeypatch.setattr(endpoint, "_LARGEST_BYTES", 1 << 20)
    sent = []
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server.url = f"http://127.0.0.1:{listening.getsockname()[1]}"

        def flood():
            connection, _ = listening.accept()
            with connection, contextlib.suppress(OSError):  # until the client hangs up
                connection.sendall(f"HTTP/1.0 {status}\r\n\r\n".encode())
                while True:
                    sent.append(connection.send(b"[" * (1 << 16)))

        threading.Thread(target=flood, daemon=True).start()
        with pytest.raises(RewardError, match=r"score answered with more than 1 MiB on 1? ?"):
            ask(1, retries=3)
    assert sum(sent) < 20 << 20  # what the sockets hold is sent too


def test_skip_asks_again_for_one_sample_at_a_time(server, ask, caplog):
    server.reply = lambda content, _: (400, b"") if "a1" in content["answers"] else right(content)
    source = ask(2, on_reward_error="skip")
    assert source.scores.isnan().tolist() == [False, True]
    assert [content["answers"] for content in server.requests] == [["a0", "a1"], ["a0"], ["a1"]]
    (record,) = caplog.records
    assert record.getMessage().startswith("1 of 2 samples have no score: --reward_fn http")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"url": "ftp://host/score"}, "http.url=ftp://host/score must begin with http:// or"),
        ({"url": ""}, "is missing its endpoint: --reward_args http.url=http://host:8000/score"),
        ({"retries": -1}, "http.retries must be at least 0"),
        ({"timeout_s": 0}, "http.timeout_s=0 must be above 0"),
        ({"timeout_s": 300}, "http.timeout_s=300 takes 1290 s with 3 retries"),
    ],
)
def test_wrong_arguments_are_refused_at_once(ask, arguments, words):
    with pytest.raises(UserError, match=words):
        ask(1, **arguments)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_key_does_not_follow_a_redirect(status, servers):
    judge, elsewhere = servers(), servers()
    judge.location, judge.reply = elsewhere.url, in_turn((status, b""))
    with pytest.raises(Fault) as fault:
        endpoint.post(judge.url, b"{}", 10, 0, {"Authorization": "Bearer secret"})
    assert fault.value.problem.startswith(f"answered {status}")
    assert judge.headers[0]["Authorization"] == "Bearer secret"
    assert elsewhere.requests == []
