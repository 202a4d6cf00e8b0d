"""What every test shares: no network, the tiny checkpoints, and runs of training steps."""

import gc
import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import settings

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
    *(str(HERE / name) for name in ("dist", "inference", "faults", "launch")),
]


def pytest_configure(config):
    """Fewer random examples in the quick suite; the same every time: a red build must be the
    change's fault.
    """
    count = 25 if "not slow" in config.option.markexpr else 100
    settings.register_profile("fixed", derandomize=True, max_examples=count)
    settings.load_profile("fixed")


def pytest_collection_modifyitems(items):
    """Files that start processes come first: last, they would leave the other worker idle."""
    starts = {item.module for item in items if "two_processes" in item.fixturenames}
    starts |= {item.module for item in items if {"subprocess", "forked"} & vars(item.module).keys()}
    items.sort(key=lambda item: item.module not in starts)


def pytest_collection_finish():
    """DeepSpeed collects garbage for every ZeRO-3 engine: what is imported by now never is any."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """``tiny("llama")`` is the folder of that tiny checkpoint; see ``tiny_models.BUILDERS``."""
    import tiny_models

    folder = tmp_path_factory.mktemp("models")
    return lambda name: str(tiny_models.ensure(folder, name))


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
