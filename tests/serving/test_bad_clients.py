"""Clients that leave, read slowly, ask for too much or send rubbish."""

import asyncio
import json
import re
from types import SimpleNamespace

import pytest
from http_client import FOREVER, answered, ask, begin, num_running, send, wait_until

from dschat.inference.protocol import SamplingParams
from dschat.inference.requests.sequence import Request
from dschat.openai_api import sending
from dschat.openai_api.patience import Overloaded
from dschat.serving.worker import EngineWorker


def is_idle(served):
    worker = served.model.worker
    cache = worker.engine.cache
    is_open = num_running(worker) or worker.num_waiting or worker.handles or served.server._running
    return not is_open and cache.num_free == cache.num_pages


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def completion(**fields):
    return COMPLETIONS, {"prompt": "a"} | fields


def conversation(role="user", content="a", turn=(), **fields):
    return CHAT, {"messages": [{"role": role, "content": content, **dict(turn)}]} | fields


def called(arguments):
    """A conversation with an earlier call."""
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    turns = [("user", "a", {}), ("assistant", "b", {"tool_calls": [call]}), ("tool", "c", {})]
    return CHAT, {"messages": [{"role": r, "content": c, **more} for r, c, more in turns]}


def with_tool(description):
    function = {"name": "f", "description": description, "parameters": {"enum": [description]}}
    return conversation(tools=[{"type": "function", "function": function}])


def schema(schema):
    return {"type": "json_schema", "json_schema": {"schema": {"type": "integer"} | schema}}


HALF = "\ud83d"  # of an emoji
NO_SCHEMA = schema({"type": "nothing"})
LONG_CHAT = [{"role": role, "content": "sun moon " * 9} for role in ("user", "assistant") * 100]
WRONG = [
    (COMPLETIONS, b"{", "the body is not JSON"),
    (COMPLETIONS, b"\xff\xfe", "the body is not JSON"),
    (COMPLETIONS, {}, "prompt: Field required"),
    (*completion(prompt=""), "prompt 0 is empty"),
    (*completion(prompt=[]), "prompt: is empty"),
    (*completion(prompt=[1, 10**9]), "outside the vocabulary"),
    (*completion(max_tokens=0), "max_tokens: "),
    (*completion(max_tokens=10**6), "exceeds"),
    (*completion(temperature=-1), "temperature -1"),
    (*completion(top_p=0), "top_p 0"),
    (*completion(n=129), "n: "),
    (*completion(prompt=[""] * 200, n=2), "more than the queue holds"),  # not encoded before
    (*completion(prompt=[""] * 265), "more than the queue holds"),  # 8 decode, 256 wait
    (*completion(prompt=[""] * 264), "prompt 0 is empty"),
    (*completion(logit_bias={"9999": 1}), "token id 9999"),
    (*completion(logit_bias={"a": 1}), "logit_bias.a"),
    (*completion(presence_penalty=3), "presence_penalty: "),
    (*completion(allowed_token_ids=[]), "allowed_token_ids: "),
    (*completion(response_format={"type": "xml"}), "response_format"),
    (*completion(response_format={"type": "json_schema"}), "response_format"),
    (*completion(response_format=NO_SCHEMA), "response_format"),
    (*completion(response_format=schema({"$ref": "#"}), stream=True), "response_format: no answer"),
    (*completion(response_format=schema({"multipleOf": 999999937})), "response_format: no answer"),
    (*completion(response_format=schema({"maximum": 10**299})), "response_format: Value is not"),
    (*completion(response_format=schema({"enum": [HALF]})), "half of a character"),
    (*completion(response_format=schema({"properties": {HALF: {}}})), "half of a character"),
    (*completion(response_format={"type": "json_object"}, min_tokens=3), "min_tokens: "),
    (*completion(**{HALF: 1}), "half of a character"),
    (*completion(stop=["x"] * 17), "stop"),
    (*completion(seed=2**64), "seed: "),
    (*completion(guided_json={}), "guided_json "),
    (*completion(structured_outputs={"choice": ["a"]}), "structured_outputs "),
    (*completion(prompt_logprobs=1), "prompt_logprobs "),
    (*completion(something_new=False), "something_new "),
    (CHAT, {"messages": []}, "messages: "),
    (CHAT, {"messages": [{"role": "user"}]}, "content"),
    (*conversation(chat_template_kwargs={"tools": []}), "tools is no variable of a chat"),
    (*conversation(add_generation_prompt=False), "add_generation_prompt "),
    (*conversation(continue_final_message=True), "continue_final_message "),
    (*conversation(chat_template_kwargs={HALF: 1}), "half of a character"),
    (*conversation(turn={HALF: 1}), "half of a character"),
    (CHAT, {"messages": LONG_CHAT}, "too long for tiny by about "),
    (*conversation(continue_final_message=False, add_generation_prompt=False), "add_generation_"),
    (*conversation(functions=[{}]), "functions "),
    (*conversation(tools=[{}]), "tools"),
    (*conversation(content=None), "messages.0: a turn without content"),
    (*conversation(content=[{"type": "image_url"}]), "a part of the type 'image_url'"),
    (
        *conversation("assistant", "a", {"tool_calls": [{}]}),
        "messages.0: a tool call without a name",
    ),
    (*conversation("assistant", None, {"tool_calls": [{}]}), "messages.0: a tool call without"),
]
NOWHERE = [(*completion(model="b"), "there is tiny"), ("/v1/nothing", {}, "Not Found")]


@pytest.mark.parametrize(
    ("status", "path", "body", "said"),
    [*((400, *row) for row in WRONG), *((404, *row) for row in NOWHERE)],
)
def test_wrong_requests(status, path, body, said, served):
    got, _, text = ask(served, path, body)
    error = json.loads(text)["error"]
    assert (got, said in error["message"]) == (status, True), text
    assert "\n" not in error["message"]


@pytest.mark.parametrize("num_words", [600, 9000])
def test_a_conversation_that_is_too_long(num_words, served):
    """Says by how much and what to do, to whoever wrote it in the web chat."""
    body = {"messages": [{"role": "user", "content": "sun " * num_words}], "max_tokens": 32}
    status, _, text = ask(served, CHAT, body)
    message = json.loads(text)["error"]["message"]
    over, has = (
        int(n.replace(",", "")) for n in re.findall(r"(?:by|has) (?:about )?([\d,]+)", message)
    )
    assert (status, over) == (400, has + 32 - 512)
    assert has == pytest.approx(count_tokens(body), rel=0.01), message
    assert "shorten the message or delete earlier turns" in message
    assert "at most" not in message  # no answer fits


def test_an_answer_that_may_be_too_long(served):
    body = {"messages": [{"role": "user", "content": "sun"}], "max_tokens": 600}
    num_tokens, message = (
        count_tokens(body),
        json.loads(ask(served, CHAT, body)[2])["error"]["message"],
    )
    assert f"ask for an answer of at most {512 - num_tokens} tokens" in message
    assert ask(served, CHAT, body | {"max_tokens": 512 - num_tokens, "ignore_eos": True})[0] == 200


def count_tokens(body):
    from transformers import AutoTokenizer

    from dschat.builtin.tiny_model import resolve_model

    tokenizer = AutoTokenizer.from_pretrained(resolve_model("builtin/tiny"))
    ids = tokenizer.apply_chat_template(
        body["messages"], add_generation_prompt=True, return_dict=False
    )
    return len(ids)


def test_fields_that_ask_for_nothing(served):
    """Null for each of the server's fields, and what clients send besides."""
    nothing = dict.fromkeys(
        ("n", "stream", "logprobs", "stop", "stop_token_ids", "ignore_eos", "seed", "guided_json")
    )
    nothing |= {"user": "a", "store": True, "metadata": {"a": "b"}, "repetition_penalty": 1.0}
    assert len(answered(served, {"prompt": "a", **nothing})["choices"]) == 1
    message = {"role": "user", "content": "a", "name": "b", "tool_calls": None}
    answered(served, {"messages": [message], **nothing}, CHAT)


@pytest.mark.parametrize(("seed", "different"), [(None, 8), (7, 1)])
def test_equal_prompts_without_a_seed_have_answers_of_their_own(seed, different, served):
    """Those of one request, and of two."""
    body = {"prompt": ["sun"] * 4, "max_tokens": 20, "ignore_eos": True, "seed": seed}
    texts = set()
    for _ in range(2):
        texts |= {choice["text"] for choice in answered(served, body)["choices"]}
    assert len(texts) == different


def test_the_drawn_token_has_one_log_prob(served):
    body = {"prompt": "sun", "max_tokens": 8, "temperature": 0, "logprobs": 3}
    (choice,) = answered(served, body)["choices"]
    assert [choice] == answered(served, body)["choices"]  # greedy
    found = choice["logprobs"]
    for value, top in zip(found["token_logprobs"], found["top_logprobs"], strict=True):
        assert value in top.values()


@pytest.mark.parametrize(
    ("sent", "meant"),
    [
        (completion(prompt="half \ud83d"), completion(prompt="half ?")),
        (completion(prompt=["half \ude00"]), completion(prompt=["half ?"])),
        (conversation(content="half \ud83d"), conversation(content="half ?")),
        (
            conversation(content=[{"type": "text", "text": "half \ud83d"}]),
            conversation(content="half ?"),
        ),
        (called('{"half": "\\ud83d"}'), called('{"half": "?"}')),
        (with_tool("half \ud83d"), with_tool("half ?")),
    ],
)
def test_half_an_emoji_is_a_question_mark(sent, meant, served):
    one, other = (
        answered(served, body | {"max_tokens": 8, "seed": 3}, path)["choices"]
        for path, body in (sent, meant)
    )
    assert one == other


def test_half_an_emoji_as_a_model(served):
    status, _, text = ask(served, COMPLETIONS, {"prompt": "a", "model": "\ud83d"})
    assert (status, json.loads(text)["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves(stream, served, before, may_step):
    """Its answers end, and their pages are free."""
    worker, steps = served.model.worker, []

    def pause():
        steps.append(1)
        if len(steps) > 20:
            may_step.wait()

    before(worker, "step", pause)
    body = FOREVER | {"n": 4, "stream": stream}
    client = send(served, COMPLETIONS, body)
    wait_until(lambda: num_running(worker) == 4)
    answered = worker.stats.answer_tokens
    client.close()
    wait_until(lambda: num_running(worker) == 0)
    may_step.set()
    wait_until(lambda: is_idle(served))
    assert worker.stats.answer_tokens - answered < 4 * 300  # not to their end


def test_a_client_that_does_not_read_holds_up_nobody(served):
    clients = [begin(served, FOREVER | {"n": 8, "logprobs": 5}) for _ in range(3)]
    answered(served, {"prompt": "moon", "max_tokens": 5})
    for client in clients:
        client.close()
    wait_until(lambda: is_idle(served))


def test_a_client_that_never_reads_is_left(monkeypatch):
    """A while after the time of its request; nothing is sent here, as to a full socket."""
    monkeypatch.setattr(sending, "_SEND_TIMEOUT_S", 0.05)
    closed = []
    generation = SimpleNamespace(close=lambda: closed.append(1))

    async def never(*_):
        await asyncio.Event().wait()

    async def follow():
        body = SimpleNamespace(stream=True)
        stream = await sending.respond(None, body, generation, None, 0.0)
        task = asyncio.create_task(stream({"type": "http"}, never, never))
        await asyncio.wait({task}, timeout=30)
        assert task.done()
        task.exception()

    asyncio.run(follow())
    assert closed


def test_a_full_queue(start, before, may_step):
    """Room for one that decodes and one that waits; the third is told to come back later, and of
    a request of several none waits.
    """
    small = start(max_num_seqs=1, max_waiting=1)
    worker = small.model.worker
    before(worker, "step", may_step.wait)
    clients = [begin(small, FOREVER)]
    wait_until(lambda: worker.num_waiting == 1)
    for two in ({"n": 2}, {"prompt": ["sun", "moon"]}):
        assert ask(small, COMPLETIONS, FOREVER | two)[0] == 429
        assert worker.num_waiting == 1
    clients.append(begin(small, FOREVER))
    status, headers, text = ask(small, COMPLETIONS, FOREVER)
    assert (status, headers["Retry-After"]) == (429, "2"), text
    may_step.set()
    for client in clients:
        client.close()
    wait_until(lambda: is_idle(small))


def test_an_answer_that_is_cancelled_leaves_the_others_waiting():
    """And makes room for one."""
    engine = SimpleNamespace(core=lambda streaming: SimpleNamespace(stats=None), max_num_seqs=3)
    worker, given = EngineWorker(engine, 0), Request([1], SamplingParams(n=3))

    async def ask_and_cancel():
        handle = worker.submit(asyncio.Queue(), given)
        worker.cancel(handle, 1)
        assert (worker.num_waiting, handle.open) == (2, {0, 2})
        worker.submit(asyncio.Queue(), Request([1], SamplingParams()))
        with pytest.raises(Overloaded):
            worker.submit(asyncio.Queue(), Request([1], SamplingParams()))

    asyncio.run(ask_and_cancel())


def test_a_server_that_stops_begins_no_answer(start):
    stopping = start(max_num_seqs=1)
    stopping.server.end_answers()
    status, _, text = ask(stopping, COMPLETIONS, {"prompt": "sun"})
    assert (status, "the server stops" in text.decode()) == (503, True)


@pytest.mark.parametrize(
    ("method", "said"), [("step", "a step failed"), ("add", "a request could not be queued")]
)
def test_what_fails_ends_its_requests_alone(method, said, served, before, caplog):
    failures = [RuntimeError("out of memory")]

    def fail_once():
        if failures:
            raise failures.pop()

    before(served.model.worker, method, fail_once)
    status, _, text = ask(served, COMPLETIONS, {"prompt": "sun"})
    assert (status, "server's log" in text.decode()) == (500, True)
    assert said in caplog.text
    assert "out of memory" in caplog.text
    answered(served, {"prompt": "sun"})
    assert ask(served, "/health", b"", "GET")[0] == 200


def test_a_request_that_takes_too_long_is_ended(start, before, may_step):
    slow = start(max_num_seqs=1, request_timeout_s=0.5)
    before(slow.model.worker, "step", may_step.wait)
    status = ask(slow, COMPLETIONS, FOREVER | {"stream": False})[0]
    may_step.set()
    assert status == 504


def test_the_health_of_a_server_whose_engine_has_ended(start):
    server = start(max_num_seqs=1)
    server.model.worker.close()
    status, _, text = ask(server, "/health", b"", "GET")
    assert (status, json.loads(text)) == (503, {"status": "failed", "models": ["tiny"]})


@pytest.mark.parametrize("name", ["evil.example", "testserver"])
def test_another_name_for_this_address(name, served):
    """A page of another site cannot reach the server by a name of its own."""
    status, _, _ = ask(served, "/v1/models", b"", "GET", Host=name)
    assert status == 400
