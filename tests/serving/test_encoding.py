"""Prompts are encoded in one thread: what it does for whom, and how much of it may wait."""

import asyncio
import json
import threading
import time
from types import SimpleNamespace

import pytest
from http_client import ask, send, wait_until

from dschat.inference.protocol import SamplingParams
from dschat.inference.sequence import Request

pytest.importorskip("fastapi")
from dschat.serving.generation import Generation  # noqa: E402
from dschat.serving.patience import TimedOut  # noqa: E402

CHAT = "/v1/chat/completions"


def chat(**fields):
    return {"messages": [{"role": "user", "content": "sun"}], "max_tokens": 2} | fields


@pytest.fixture
def held(small, monkeypatch):
    """A server whose encoders wait; what they have begun to encode."""
    import dschat.serving.app as app

    encode, may_go, begun = app.prompt_text_ids, threading.Event(), []

    def late(encoder, messages):
        begun.append(messages[-1]["content"])
        assert may_go.wait(60)
        return encode(encoder, messages)

    monkeypatch.setattr(app, "prompt_text_ids", late)
    small.may_go, small.begun = may_go, begun
    yield small
    may_go.set()


def test_prompts_of_clients_that_left_are_not_encoded(held):
    """And more than --max_waiting that wait for it are refused."""
    first = send(held, CHAT, chat())
    wait_until(lambda: held.begun == ["sun"])
    second = send(held, CHAT, chat(messages=[{"role": "user", "content": "moon"}]))
    wait_until(lambda: held.server._encoders._num_waiting == 2)
    status, headers, text = ask(held, CHAT, chat())
    assert (status, headers["Retry-After"]) == (429, "2"), text
    for client in (first, second):
        client.close()
    wait_until(lambda: held.server._encoders._num_waiting == 0)
    held.may_go.set()
    assert ask(held, CHAT, chat())[0] == 200
    assert held.begun == ["sun", "sun"]  # never the moon


def test_the_time_of_a_request_includes_its_encoding(held, monkeypatch):
    monkeypatch.setattr(held.server._encoders, "_timeout_s", 0.2)
    status, _, text = ask(held, CHAT, chat())
    assert (status, "too long" in text.decode()) == (504, True)
    held.may_go.set()


def test_what_encoding_took_is_not_left_for_the_answer(served):
    """A request that began 100 s ago, and an engine that draws nothing."""
    worker = SimpleNamespace(engine=served.model.worker.engine)
    worker.submit = worker.cancel = lambda *_: object()
    model = SimpleNamespace(worker=worker, tokenizer=served.model.tokenizer)

    async def follow():
        began = time.perf_counter() - 100
        generation = Generation(model, [Request([1], SamplingParams(max_new_tokens=1))], [], began)
        async for _ in generation.events(timeout_s=100):
            raise AssertionError("no token comes")

    with pytest.raises(TimedOut):
        asyncio.run(asyncio.wait_for(follow(), 30))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/score", "/api/preference"])
def test_conversations_have_a_bound(path, compared):
    messages = [{"role": ("user", "assistant")[i % 2], "content": ""} for i in range(257)]
    body = {"messages": messages}
    if path.startswith("/api"):
        body |= {"answers": ["a"], "chosen": "a", "rejected": "b"}
    status, _, text = ask(compared, path, body)
    error = json.loads(text)["error"]["message"]
    assert (status, "messages: " in error, "at most 256" in error) == (400, True, True)


def test_too_many_prompts_are_refused_before_they_are_encoded(served, monkeypatch):
    monkeypatch.setattr(served.model, "encoder", None)
    status, _, text = ask(served, "/v1/completions", {"prompt": ["a"] * 300})
    assert (status, "more than the queue holds" in text.decode()) == (400, True)


def test_a_conversation_is_rendered_once_for_all_scored_answers(compared, monkeypatch):
    from dschat.data import segments

    rendered, render = [], segments.render_chat
    monkeypatch.setattr(
        segments, "render_chat", lambda *a, **k: rendered.append(a) or render(*a, **k)
    )
    turns = [{"role": ("user", "assistant")[i % 2], "content": "a"} for i in range(21)]
    for count in (1, 8):
        rendered.clear()
        body = {"messages": turns, "answers": ["b"] * count}
        assert ask(compared, "/api/score", body)[0] == 200
        assert len(rendered) == 2 * 10 + 1 + 2 * count
