"""Starts a server in a thread, on a tiny model with random weights."""

import shutil
import sys
import threading
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def served(tmp_path_factory):
    """A server of ``builtin/tiny`` under the name tiny, and its address."""
    with _serving(tmp_path_factory, max_num_seqs=8) as found:
        yield found


@pytest.fixture
def start(tmp_path_factory):
    """``start(flag=value)``: a server like ``served`` that lives as long as the test."""
    with ExitStack() as running:
        yield lambda **options: running.enter_context(_serving(tmp_path_factory, **options))


@pytest.fixture(scope="session")
def compared(tmp_path_factory):
    """A server of two models, with a reward model of random weights."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from dschat.builtin.tiny_model import resolve_model

    source, folder = resolve_model("builtin/tiny"), tmp_path_factory.mktemp("reward")
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(source, num_labels=1)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    paths = ["tiny=builtin/tiny", "other=builtin/tiny"]
    options = {"path": paths, "reward_model": str(folder), "max_num_seqs": 4}
    with _serving(tmp_path_factory, **options) as found:
        yield found


@pytest.fixture(scope="module")
def client(served):
    """OpenAI's own client of ``served``."""
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")  # while it is open, asyncio has a loop that runs
def browser():
    """A Chromium that is installed."""
    playwright = pytest.importorskip("playwright.sync_api")
    names = ("chromium", "chromium-browser", "chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip("Chromium is not installed")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def page(browser, compared):
    """The page, with what the console and the network said in ``page.problems``."""
    # NOTE: `wait_for_function` evaluates strings, which the page's policy forbids.
    permissions = ["clipboard-read", "clipboard-write"]
    context = browser.new_context(permissions=permissions, bypass_csp=True)
    opened = context.new_page()
    opened.problems, opened.expected = [], "nothing"
    opened.on("pageerror", lambda error: opened.problems.append(str(error)))
    opened.on("console", lambda m: m.type == "error" and opened.problems.append(m.text))
    opened.on(
        "request",
        lambda r: r.url.startswith(compared.url) or opened.problems.append(r.url),
    )
    opened.goto(compared.url)
    opened.wait_for_selector("#models input")
    yield opened
    assert [said for said in opened.problems if opened.expected not in said] == []
    context.close()


@pytest.fixture
def may_step():
    """Steps wait for it; the end of a test sets it, so that a failure leaves no thread waiting."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def before(monkeypatch):
    """``before(worker, name, action)``: ahead of each call of that method of the engine's core."""

    def patch(worker, name, action):
        method = getattr(worker.core, name)

        def call(*args):
            action()
            return method(*args)

        monkeypatch.setattr(worker.core, name, call)

    return patch


@pytest.fixture(scope="session")
def same_products():
    """A scope whose engines round a row the same in any batch. By timing, a processor may get
    products that do not, and a draw at the border of two tokens falls otherwise.
    """
    return _same_products


@contextmanager
def _same_products():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DSCHAT_CPU_MATMUL", "panels")
        yield


@contextmanager
def _serving(tmp_path_factory, path=("tiny=builtin/tiny",), limits=None, **options):
    """``limits``: of connections, as attributes of `BoundedConnection`."""
    uvicorn = pytest.importorskip("uvicorn")
    from dschat.openai_api.limits import BoundedConnection
    from dschat.serving.__main__ import _listen
    from dschat.serving.app import Server, create_app
    from dschat.serving.flags import ServeConfig
    from dschat.serving.web_chat import ChatScorer, PreferenceFile
    from dschat.serving.worker import load_models

    folder = tmp_path_factory.mktemp("serving")
    preferences = str(folder / "preferences.jsonl")
    config = ServeConfig(path=list(path), preferences=preferences, **options)
    with _same_products():
        server = Server(config, load_models(config))
    scorer = None
    if config.reward_model is not None:
        scorer = ChatScorer(config.reward_model, config.dtype)
    app = create_app(server, [], PreferenceFile(config.preferences), scorer)
    listener = _listen("127.0.0.1", 0)
    settings = uvicorn.Config(
        app,
        log_level="warning",
        lifespan="on",
        http=type("Limited", (BoundedConnection,), limits or {}),
        timeout_keep_alive=(limits or {}).get("header_timeout_s", 5),
        timeout_graceful_shutdown=5,  # of requests that a failure left
    )
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
