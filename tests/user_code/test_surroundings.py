"""What the user's code does to this process, and what the run has afterwards."""

import os
import sys
import threading
from contextlib import suppress

import pytest
import torch

from dschat.distributed import env
from dschat.user_code import calls, surroundings
from dschat.user_code.surroundings import restored

CHANGED = "{} changed the working directory: put back; use absolute paths there"


@pytest.fixture(autouse=True)
def apart(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    # Another file's environment that sleeps, past its time limit, holds a scope open.
    monkeypatch.setattr(surroundings, "_num_open", 0)
    surroundings._warn.cache_clear()


def test_the_run_keeps_its_working_directory(tmp_path, caplog):
    """A line says so once; the run itself may move."""
    (tmp_path / "other").mkdir()
    for _ in range(2):
        with suppress(KeyError), restored("f"):
            os.chdir("other")
            raise KeyError
        assert os.getcwd() == str(tmp_path)
    assert [record.getMessage() for record in caplog.records] == [CHANGED.format("f")]
    os.chdir("other")
    with restored("g"):
        os.chdir("..")
    assert os.getcwd() == str(tmp_path / "other")
    with restored("h"):
        pass
    assert len(caplog.records) == 2


def test_scopes_of_several_threads(tmp_path):
    """The first one ends last: the run has its directory when none is left."""
    (tmp_path / "a").mkdir()
    entered, done = threading.Event(), threading.Event()

    def long():
        with restored("long"):
            os.chdir("a")
            entered.set()
            assert done.wait(10)

    thread = threading.Thread(target=long)
    thread.start()
    assert entered.wait(10)
    with restored("short"):
        assert os.getcwd() == str(tmp_path / "a")
    assert os.getcwd() == str(tmp_path / "a")  # `long` still needs it
    done.set()
    thread.join()
    assert os.getcwd() == str(tmp_path)


def test_a_directory_that_is_removed(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    with restored("f"):
        os.chdir(gone)
        gone.rmdir()
    assert os.getcwd() == str(tmp_path)


def test_a_run_whose_own_directory_is_removed(tmp_path):
    """Calls return as before: the run needs none."""
    (tmp_path / "gone").mkdir()
    os.chdir(tmp_path / "gone")
    with restored("f"):
        (tmp_path / "gone").rmdir()
    assert calls.called(lambda: 3) == 3
    with restored("f"):
        os.chdir(tmp_path)


def test_the_default_dtype_is_put_back_also_after_an_error(caplog):
    with suppress(KeyError), restored("--reward_fn f"):
        torch.set_default_dtype(torch.float64)
        raise KeyError
    assert torch.get_default_dtype() == torch.float32
    (record,) = caplog.records
    assert record.getMessage() == "--reward_fn f changed torch's default dtype: put back"


def test_a_default_dtype_of_a_torch_that_the_code_imports(monkeypatch):
    """Workers have none before."""
    modules = {name: module for name, module in sys.modules.items() if name != "torch"}
    monkeypatch.setattr(sys, "modules", modules)
    with restored("f"):
        modules["torch"] = torch
    assert torch.get_default_dtype() == torch.float32


def test_files_that_are_imported_and_calls(tmp_path):
    (tmp_path / "moves.py").write_text(
        "import os, torch\n"
        "os.chdir('/')\n"
        "torch.set_default_dtype(torch.float64)\n"
        "def where(): return os.getcwd()\n"
    )
    for _ in range(2):  # the file is found again: its name is relative to the run's directory
        where = calls.load("moves.py:where", "--reward_fn moves.py:where")
    assert (os.getcwd(), torch.get_default_dtype()) == (str(tmp_path), torch.float32)
    assert calls.called(where) == str(tmp_path)


def test_ranks_are_those_of_the_start(monkeypatch):
    monkeypatch.setattr(env, "_variables", os.environ)
    for name, value in {"MASTER_ADDR": "a", "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    env.pin(True)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "7")
    monkeypatch.delenv("MASTER_ADDR")
    assert (env.rank(), env.world_size(), env.local_rank()) == (1, 2, 0)
    env.pin(False)
    assert (env.rank(), env.world_size()) == (0, 1)
