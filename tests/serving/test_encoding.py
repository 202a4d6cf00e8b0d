"""Prompts are encoded in one thread: what it does for whom, and how much of it may wait."""

import asyncio
import json
import threading
import time
from types import SimpleNamespace

import pytest
from http_client import answered, ask, send, wait_until

from dschat.inference.protocol import SamplingParams
from dschat.inference.requests.sequence import Request

pytest.importorskip("fastapi")
from dschat.openai_api.generation import Generation  # noqa: E402
from dschat.openai_api.patience import TimedOut  # noqa: E402

CHAT = "/v1/chat/completions"


def chat(**fields):
    return {"messages": [{"role": "user", "content": "sun"}], "max_tokens": 2} | fields


@pytest.fixture
def held(start, monkeypatch):
    """``held(flag=value)``: a small server whose encoder waits; what it has begun to encode."""
    import dschat.serving.app as app

    encode, may_go, begun = app.prompt_text_ids, threading.Event(), []

    def late(encoder, messages, **inputs):
        begun.append(messages[-1]["content"])
        assert may_go.wait(60)
        return encode(encoder, messages, **inputs)

    def make(**flags):
        small = start(max_num_seqs=1, max_waiting=1, **flags)
        small.may_go, small.begun = may_go, begun
        return small

    monkeypatch.setattr(app, "prompt_text_ids", late)
    yield make
    may_go.set()


def test_prompts_of_clients_that_left_are_not_encoded(held):
    """And more than --max_waiting that wait for it are refused."""
    held = held()
    first = send(held, CHAT, chat())
    wait_until(lambda: held.begun == ["sun"])
    second = send(held, CHAT, chat(messages=[{"role": "user", "content": "moon"}]))
    wait_until(lambda: held.server.encoders.num_waiting == 2)
    status, headers, text = ask(held, CHAT, chat())
    assert (status, headers["Retry-After"]) == (429, "2"), text
    for client in (first, second):
        client.close()
    wait_until(lambda: held.server.encoders.num_waiting == 0)
    held.may_go.set()
    answered(held, chat(), CHAT)
    assert held.begun == ["sun", "sun"]  # never the moon


def test_the_time_of_a_request_includes_its_encoding(held):
    status, _, text = ask(held(request_timeout_s=0.2), CHAT, chat())
    assert (status, "too long" in text.decode()) == (504, True)


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
    said = "messages: there are 257, and at most 256 can be sent; delete earlier turns, or start"
    assert (status, said in error) == (400, True)


def test_a_conversation_is_rendered_once_for_all_scored_answers(compared, monkeypatch):
    from dschat.data import rendering, segments

    rendered, render = [], rendering.render_chat
    for module in (rendering, segments):
        monkeypatch.setattr(
            module, "render_chat", lambda *a, **k: rendered.append(a) or render(*a, **k)
        )
    turns = [{"role": ("user", "assistant")[i % 2], "content": "a"} for i in range(21)]
    for count in (1, 8):
        rendered.clear()
        body = {"messages": turns, "answers": ["b"] * count}
        answered(compared, body, "/api/score")
        assert len(rendered) == 2 * 10 + 1 + 2 * count
