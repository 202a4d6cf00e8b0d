"""Names of models, API keys, and which requests need one."""

import asyncio

import pytest

from dschat.config import UserError
from dschat.serving.flags import ServeConfig, api_keys

pytest.importorskip("fastapi")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("out/step3_rlhf/actor", "step3_rlhf"),
        ("out/step3_rlhf/actor_ema", "step3_rlhf/actor_ema"),
        ("out/step1_sft/", "step1_sft"),
        ("owner/model", "model"),
        ("mine=out/step1_sft", "mine"),
    ],
)
def test_names(path, name):
    assert [n for n, _ in ServeConfig(path=[path]).models] == [name]


def test_two_models_of_one_name():
    paths = ["a/step3_rlhf/actor", "b/step3_rlhf/actor"]
    config = ServeConfig(path=paths)
    config.validate()
    assert config.models == list(zip(["a/step3_rlhf", "b/step3_rlhf"], paths, strict=True))
    with pytest.raises(UserError, match="^--path: two are named actor; .* write NAME=FOLDER"):
        ServeConfig(path=["step1=x", "actor=y", "actor=z"]).validate()


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("a.b", False)],
)
def test_which_hosts_are_local(host, local):
    assert ServeConfig(path=["a"], host=host).is_local == local


def test_keys(tmp_path):
    file = tmp_path / "keys"
    file.write_text(" one \n\ntwo\n")
    config = ServeConfig(path=["a"], api_key_file=str(file))
    assert api_keys(config, "three, four") == ["three", "four", "one", "two"]
    assert api_keys(ServeConfig(path=["a"]), None) == []
    for variable in ("", " , "):
        with pytest.raises(UserError, match="DSCHAT_API_KEYS is set and has no key"):
            api_keys(ServeConfig(path=["a"]), variable)
    file.write_text("\n")
    with pytest.raises(UserError, match="has no key"):
        api_keys(config, None)
    file.write_bytes(b"\xff")
    with pytest.raises(UserError, match="not a text file"):
        api_keys(config, None)


def guarded(path, *, key=None, body=(b"",), origin=None, origins=()):
    """The status of a request, and the body that the application read. Of a list, ``body`` loses
    the parts that are read.
    """
    from dschat.openai_api.limits import Guard

    parts, sent, read = body if isinstance(body, list) else list(body), [], []

    async def app(scope, receive, send):
        read.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 200})

    async def receive():
        if not parts:
            await asyncio.sleep(60)
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    async def send(message):
        sent.append(message)

    headers = [(b"authorization", key)] if key else []
    headers += [(b"origin", origin)] if origin else []
    headers.append((b"content-type", b"application/json; charset=utf-8"))
    scope = {"type": "http", "path": path, "method": "POST", "headers": headers}
    guard = Guard(app, ["right"], 10, origins, body_timeout_s=30 if body else 0.05)
    asyncio.run(guard(scope, receive, send))
    return sent[0]["status"], b"".join(read)


@pytest.mark.parametrize(
    ("path", "key", "status"),
    [
        ("/v1/models", None, 401),
        ("/v1/models", b"Bearer wrong", 401),
        ("/v1/models", b"right", 401),
        ("/v1/models", b"Basic right", 401),
        ("/v1/models", b"Bearer right", 200),
        ("/v1/models", b"bearer right", 200),
        ("/api/preference", None, 401),
        ("/health", None, 200),
        ("/", None, 200),
    ],
)
def test_who_may_enter(path, key, status):
    assert guarded(path, key=key)[0] == status


@pytest.mark.parametrize(
    ("origins", "status"), [((), 403), (["http://a.example"], 200), (["*"], 200)]
)
def test_pages_that_may_send(origins, status):
    assert guarded("/", origin=b"http://a.example", origins=origins)[0] == status


def test_bodies():
    assert guarded("/", body=(b"12345", b"67890")) == (200, b"1234567890")
    assert guarded("/", body=(b"12345", b"67890", b"1")) == (413, b"")
    assert guarded("/", body=()) == (408, b"")  # it does not arrive


@pytest.mark.parametrize(("last", "num_left"), [(2**20, 3), (2**20 - 1, 2)])
def test_of_a_refused_body_so_much_is_read(last, num_left):
    """64 MiB beyond the limit of 10 bytes: not a part more, and none less."""
    mib = bytes(2**20)
    body = [bytes(10), *[mib] * 63, mib[:last], b"1", b"2", b"3"]
    assert guarded("/", body=body) == (413, b"")
    assert len(body) == num_left


def test_a_port_in_use():
    from dschat.serving.__main__ import _listen

    with _listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"--port {port} .*: address already in use; choose"):
            _listen("127.0.0.1", port)


def test_large_bodies_that_do_not_arrive_hold_little_memory():
    """Those beyond a number are refused, small ones never; what they held is free when they end."""
    from dschat.openai_api.limits import Guard

    max_bytes, half, whole = 100_000, bytes(99_000), bytes(100_000)

    async def ask(guard, *parts, ends=True):
        """The status of a request whose body comes in ``parts``."""
        messages = [{"body": part, "more_body": True} for part in parts]
        if ends:
            messages[-1]["more_body"] = False
        statuses = []

        async def receive():
            return messages.pop(0) if messages else await asyncio.Event().wait()

        async def send(message):
            statuses.append(message.get("status"))

        headers = [(b"content-type", b"application/json")]
        await guard({"type": "http", "method": "POST", "headers": headers}, receive, send)
        return statuses[0]

    async def app(scope, receive, send):
        await receive()
        await send({"type": "http.response.start", "status": 200})

    async def run():
        guard = Guard(app, [], max_bytes, body_timeout_s=30)
        unfinished = [asyncio.create_task(ask(guard, half, ends=False)) for _ in range(300)]
        await asyncio.sleep(0.1)
        assert guard._held <= 33 * max_bytes
        assert await ask(guard, half) == 429
        assert await ask(guard, half, bytes(2_000)) == 413
        assert await ask(guard, bytes(60_000)) == 200
        for task in unfinished:
            task.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)
        assert guard._held == 0
        assert await ask(guard, whole) == 200

    asyncio.run(run())
