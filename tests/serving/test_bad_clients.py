"""Clients that leave, read slowly, ask for too much or send rubbish."""

import http.client
import json
import socket
import threading
import time

import pytest
from http_client import FOREVER, ask, begin


def wait_until(condition):
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("waited for 30 s")


def is_idle(served):
    worker = served.model.worker
    cache = worker.engine.cache
    return not worker._open and not worker._handles and cache.num_free == cache.num_pages


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/v1/completions", b"{", 400, "the body is not JSON"),
        ("/v1/completions", b"\xff\xfe", 400, "the body is not JSON"),
        ("/v1/completions", {}, 400, "prompt: Field required"),
        ("/v1/completions", {"prompt": ""}, 400, "prompt 0 is empty"),
        ("/v1/completions", {"prompt": []}, 400, "prompt: is empty"),
        ("/v1/completions", {"prompt": [1, 10**9]}, 400, "outside the vocabulary"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens: "),
        ("/v1/completions", {"prompt": "a", "max_tokens": 10**6}, 400, "exceeds"),
        ("/v1/completions", {"prompt": "a", "temperature": -1}, 400, "temperature -1"),
        ("/v1/completions", {"prompt": "a", "top_p": 0}, 400, "top_p 0"),
        ("/v1/completions", {"prompt": "a", "n": 129}, 400, "n: "),
        ("/v1/completions", {"prompt": ["a"] * 300, "n": 2}, 400, "more than the queue holds"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"9999": 1}}, 400, "token id 9999"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {"a": 1}}, 400, "logit_bias.a"),
        ("/v1/completions", {"prompt": "a", "presence_penalty": 3}, 400, "presence_penalty: "),
        ("/v1/completions", {"prompt": "a", "allowed_token_ids": []}, 400, "allowed_token_ids: "),
        *(
            ("/v1/completions", {"prompt": "a", "response_format": wanted}, 400, "response_format")
            for wanted in (
                {"type": "xml"},
                {"type": "json_schema"},
                {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}},
            )
        ),
        ("/v1/completions", {"prompt": "a", "stop": ["x"] * 17}, 400, "stop"),
        ("/v1/completions", {"prompt": "a", "seed": 2**64}, 400, "seed: "),
        ("/v1/completions", {"prompt": "a", "model": "b"}, 404, "there is tiny"),
        ("/v1/chat/completions", {"messages": []}, 400, "messages: "),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, 400, "content"),
        *(
            ("/v1/completions", {"prompt": "a", name: value}, 400, f"{name} ")
            for name, value in (
                ("guided_json", {}),
                ("structured_outputs", {"choice": ["a"]}),
                ("prompt_logprobs", 1),
                ("something_new", False),
            )
        ),
        *(
            (
                "/v1/chat/completions",
                {"messages": [{"role": "user", "content": "a"}], name: value},
                400,
                f"{name} ",
            )
            for name, value in (
                ("chat_template_kwargs", {"enable_thinking": False}),
                ("add_generation_prompt", False),
                ("continue_final_message", True),
                ("functions", [{}]),
            )
        ),
        *(
            (
                "/v1/chat/completions",
                {"messages": [{"role": "assistant", "content": c, "tool_calls": [{}]}]},
                400,
                "messages.0: a tool call without a name",
            )
            for c in ("a", None)
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": None}]},
            400,
            "messages.0: a turn without content",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "tools": [{}]},
            400,
            "tools",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "messages.0: a turn with a part of the type 'image_url'",
        ),
        ("/v1/nothing", {}, 404, "Not Found"),
    ],
)
def test_wrong_requests(path, body, status, said, served):
    got, _, text = ask(served, path, body)
    error = json.loads(text)["error"]
    assert (got, said in error["message"]) == (status, True), text
    assert "\n" not in error["message"]


def test_fields_that_ask_for_nothing(served):
    """Null for each of the server's fields, and what clients send besides."""
    nothing = dict.fromkeys(
        ("n", "stream", "logprobs", "stop", "stop_token_ids", "ignore_eos", "seed", "guided_json")
    )
    nothing |= {"user": "a", "store": True, "metadata": {"a": "b"}, "repetition_penalty": 1.0}
    status, _, text = ask(served, "/v1/completions", {"prompt": "a", **nothing})
    assert (status, len(json.loads(text)["choices"])) == (200, 1), text
    message = {"role": "user", "content": "a", "name": "b", "tool_calls": None}
    assert ask(served, "/v1/chat/completions", {"messages": [message], **nothing})[0] == 200


def test_equal_prompts_without_a_seed_have_answers_of_their_own(served):
    body = {"prompt": ["sun"] * 4, "max_tokens": 20, "ignore_eos": True}
    for seed in (None, 7):
        status, _, text = ask(served, "/v1/completions", body | {"seed": seed})
        assert status == 200, text
        texts = {choice["text"] for choice in json.loads(text)["choices"]}
        assert len(texts) == (4 if seed is None else 1)


def test_the_drawn_token_has_one_log_prob(served):
    body = {"prompt": "sun", "max_tokens": 8, "temperature": 0, "logprobs": 3}
    (choice,) = json.loads(ask(served, "/v1/completions", body)[2])["choices"]
    found = choice["logprobs"]
    for value, top in zip(found["token_logprobs"], found["top_logprobs"], strict=True):
        assert value in top.values()


@pytest.mark.parametrize(
    ("path", "sent", "meant"),
    [
        ("/v1/completions", {"prompt": "half \ud83d"}, {"prompt": "half ?"}),
        ("/v1/completions", {"prompt": ["half \ude00"]}, {"prompt": ["half ?"]}),
        *(
            (
                "/v1/chat/completions",
                *({"messages": [{"role": "user", "content": c}]} for c in both),
            )
            for both in (
                ("half \ud83d", "half ?"),
                ([{"type": "text", "text": "half \ud83d"}], "half ?"),
            )
        ),
    ],
)
def test_half_an_emoji_is_a_question_mark(path, sent, meant, served):
    answers = []
    for body in (sent, meant):
        status, _, text = ask(served, path, body | {"max_tokens": 8, "seed": 3})
        assert status == 200, text
        answers.append(json.loads(text)["choices"])
    assert answers[0] == answers[1]


def test_half_an_emoji_as_a_model(served):
    assert ask(served, "/v1/completions", {"prompt": "a", "model": "\ud83d"})[0] == 404


def test_a_body_too_large(served):
    body = json.dumps({"prompt": "a" * 10 * 2**20}).encode()
    status, _, text = ask(served, "/v1/completions", body)
    assert (status, "--max_request_mib" in text.decode()) == (413, True)


def test_a_large_body_without_its_size(served):
    """In chunks, so that the server learns of the size as it reads."""
    chunks = iter([b"a" * 2**16] * 160)
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", chunks, headers, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves(stream, served, monkeypatch):
    """Its answers end, and their pages are free."""
    worker, may_step = served.model.worker, threading.Event()
    step, steps = worker._core.step, []

    def pauses():
        steps.append(1)
        if len(steps) > 20:
            may_step.wait()
        return step()

    monkeypatch.setattr(worker._core, "step", pauses)
    body = FOREVER | {"n": 4, "stream": stream}
    if stream:
        client = begin(served, body)
    else:
        client = socket.create_connection(("127.0.0.1", served.port), timeout=60)
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}"
        client.sendall(f"{head}\r\nContent-Type: application/json\r\n\r\n".encode() + data)
    wait_until(lambda: worker.num_running == 4)
    before = worker.stats.answer_tokens
    client.close()
    wait_until(lambda: not worker._open)
    may_step.set()
    wait_until(lambda: is_idle(served))
    assert worker.stats.answer_tokens - before < 4 * 300  # not to their end


def test_a_client_that_does_not_read_holds_up_nobody(served):
    clients = [begin(served, FOREVER | {"n": 8, "logprobs": 5}) for _ in range(3)]
    status, _, text = ask(served, "/v1/completions", {"prompt": "moon", "max_tokens": 5})
    assert status == 200, text
    for client in clients:
        client.close()
    wait_until(lambda: is_idle(served))


def test_a_full_queue(small, monkeypatch):
    """Room for one that decodes and one that waits; the third is told to come back later."""
    worker, may_step = small.model.worker, threading.Event()
    step = worker._core.step

    def late():
        may_step.wait()
        return step()

    monkeypatch.setattr(worker._core, "step", late)
    clients = [begin(small, FOREVER) for _ in range(2)]
    wait_until(lambda: worker.num_waiting == 2)
    status, headers, text = ask(small, "/v1/completions", FOREVER)
    assert (status, headers["Retry-After"]) == (429, "2"), text
    may_step.set()
    for client in clients:
        client.close()
    wait_until(lambda: is_idle(small))


def test_a_step_that_fails_ends_its_requests_alone(served, monkeypatch, caplog):
    worker = served.model.worker
    step = worker._core.step

    def fails():
        monkeypatch.setattr(worker._core, "step", step)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(worker._core, "step", fails)
    status, _, text = ask(served, "/v1/completions", {"prompt": "sun"})
    assert (status, "server's log" in text.decode()) == (500, True)
    assert "out of memory" in caplog.text
    assert ask(served, "/v1/completions", {"prompt": "sun"})[0] == 200
    assert ask(served, "/health", b"", "GET")[0] == 200


def test_a_request_that_cannot_be_queued_fails_alone(served, monkeypatch):
    core = served.model.worker._core
    add = core.add

    def fails(*_):
        monkeypatch.setattr(core, "add", add)
        raise RuntimeError("no memory")

    monkeypatch.setattr(core, "add", fails)
    assert ask(served, "/v1/completions", {"prompt": "sun"})[0] == 500
    assert ask(served, "/v1/completions", {"prompt": "sun"})[0] == 200


def test_metrics(served):
    ask(served, "/v1/completions", {"prompt": "sun", "max_tokens": 3, "ignore_eos": True})
    _, _, text = ask(served, "/metrics", b"", "GET")
    lines = dict(line.rsplit(" ", 1) for line in text.decode().splitlines() if line[0] != "#")
    assert float(lines['dschat_requests_total{path="/v1/completions",status="200"}']) >= 1
    assert float(lines['dschat_answer_tokens_total{model="tiny"}']) >= 3
    assert float(lines['dschat_running{model="tiny"}']) == 0


@pytest.mark.parametrize("name", ["evil.example", "testserver"])
def test_another_name_for_this_address(name, served):
    """A page of another site cannot reach the server by a name of its own."""
    status, _, _ = ask(served, "/v1/models", b"", "GET", Host=name)
    assert status == 400
