"""What every test shares: no network, the tiny checkpoints, and runs of training steps."""

import gc
import os
import signal
import sys
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings

# Compile each module once, not in every worker and process that the tests start.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Timing would make results depend on the machine's load; tests/models/test_linear.py covers oneDNN.
os.environ.setdefault("DSCHAT_CPU_MATMUL", "mkl")
# A script's `make test &` starts us deaf to Ctrl-C, and what the tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# `tiny_models`, `step_cases`, `families`, `forked`, ... are plain modules: workers import them too.
HERE = Path(__file__).parent
sys.path[:0] = [
    str(HERE),
    *(str(HERE / name) for name in ("dist", "inference", "faults", "launch", "models/packing")),
]
sys.path.append(str(HERE.parent / "benchmarks"))  # last: it has modules of equal names


def pytest_configure(config):
    """Fewer random examples in the quick suite; the same every time: a red build must be the
    change's fault.
    """
    count = 10 if "not slow" in config.option.markexpr else 100
    settings.register_profile("fixed", derandomize=True, max_examples=count)
    settings.load_profile("fixed")


def pytest_collection_modifyitems(items):
    """Files that start processes or wait come first: last, they would leave a core idle."""
    starts = {item.module for item in items if "two_processes" in item.fixturenames}
    words = {"subprocess", "forked", "signal"}
    starts |= {item.module for item in items if words & vars(item.module).keys()}
    items.sort(key=lambda item: item.module not in starts)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Without garbage collection, which takes a fifth of the time of importing torch."""
    # NOTE: not before xdist has started its workers, which a hang-up may not kill: a handler is not
    # inherited, so that what the tests start is not deaf to SIGHUP under nohup.
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)
    gc.disable()
    try:
        return (yield)
    finally:
        freeze_objects()
        gc.enable()


def pytest_runtest_teardown(item, nextitem):
    if nextitem is None or nextitem.path != item.path:
        freeze_objects()


def freeze_objects():
    """DeepSpeed collects garbage for every ZeRO-3 engine: modules, and what is left over, are
    none.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """``--dist loadfile``, but what shares `forked`'s server goes to one worker, as one file."""
    if config.option.dist != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class OneServer(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return "forked" if uses_server(config.rootpath / file) else file

    return OneServer(config, log)


@cache
def uses_server(file):
    """Whether a test file's commands run in forks, some through its folder's fixtures."""
    text = file.read_text()
    return file.parent.name in ("dist", "faults") or "forked" in text or "small_run" in text


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """``tiny("llama")`` is the folder of that tiny checkpoint, which all workers share; see
    ``tiny_models.ensure``.
    """
    import tiny_models
    from filelock import FileLock

    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    lock = FileLock(base / "models.lock")

    def folder_of(name):
        with lock:
            return str(tiny_models.ensure(base / "models", name))

    return folder_of


@pytest.fixture(scope="session")
def models_folder(tiny):
    """The folder that holds all tiny checkpoints that training steps start from."""
    import step_cases

    for name in step_cases.MODELS:
        path = Path(tiny(name))
    return path.parent


@pytest.fixture(scope="session")
def run_here(models_folder, tmp_path_factory):
    """``run_here(case)``: a ``step_cases.Case``'s result in this process and its folder; run
    once.
    """
    import step_cases

    out, done = tmp_path_factory.mktemp("one_process"), {}

    def run(case):
        if case not in done:
            folder = out / case.name
            done[case] = step_cases.run(case, models_folder, folder)
        return done[case], out / case.name

    return run


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """An empty cache of the library datasets."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def container(tmp_path_factory, monkeypatch):
    """``container(limit, used, cached)``: a container's memory, in bytes."""
    from dschat.distributed import memory

    folder = tmp_path_factory.mktemp("cgroup")

    def limit(limit, used=0, cached=0):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\n")

    monkeypatch.setattr(memory, "CGROUP", folder)
    return limit


@pytest.fixture
def fp16_works(monkeypatch):
    """torch computes in fp16 on any CPU; DeepSpeed only refuses to where it would be slow."""
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(type(get_accelerator()), "is_fp16_supported", lambda self: True)


@pytest.fixture(scope="session")
def module_of():
    """``module_of("llama")``: that family's tiny module, shared, so never to be changed."""
    import families

    made = {}

    def get(name):
        if name not in made:
            made[name] = families.build(name)
        return made[name]

    return get
