"""Starts a server in a thread, on a tiny model with random weights."""

import threading
from types import SimpleNamespace

import pytest


@pytest.fixture(scope="session")
def served(tmp_path_factory):
    """A server of ``builtin/tiny`` under the name tiny, and its address."""
    yield from _serve(tmp_path_factory, path=["tiny=builtin/tiny"], max_num_seqs=8)


@pytest.fixture
def small(tmp_path_factory):
    """A server with one slot, one place in the queue, and little patience."""
    sizes = {"max_num_seqs": 1, "max_waiting": 1, "request_timeout_s": 1.0}
    yield from _serve(tmp_path_factory, path=["tiny=builtin/tiny"], **sizes)


def _serve(tmp_path_factory, **options):
    uvicorn = pytest.importorskip("uvicorn")
    from dschat.serving.__main__ import _listen
    from dschat.serving.app import Server, create_app
    from dschat.serving.flags import ServeConfig
    from dschat.serving.load import load_models

    folder = tmp_path_factory.mktemp("serving")
    config = ServeConfig(preferences=str(folder / "preferences.jsonl"), **options)
    server = Server(config, load_models(config))
    listener = _listen("127.0.0.1", 0)
    settings = uvicorn.Config(create_app(server, []), log_level="warning", lifespan="on")
    running = uvicorn.Server(settings)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
    thread.start()
    while not running.started:
        assert thread.is_alive()
        thread.join(0.01)
    port = listener.getsockname()[1]
    yield SimpleNamespace(
        server=server,
        model=server.models["tiny"],
        port=port,
        url=f"http://127.0.0.1:{port}",
        config=config,
    )
    running.should_exit = True
    thread.join()
