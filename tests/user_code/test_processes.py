"""The worker process: how it dies and restarts, and that it never outlives its parent."""

import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import Pipe
from pathlib import Path

import psutil
import pytest
from quick import slow

from dschat.user_code.calls import Fault
from dschat.user_code.processes import Killable, Worker

ROOT = Path(__file__).parents[2]
SERVED = f"{Path(__file__).with_name('served.py')}:Served"


@pytest.fixture
def worker():
    made = Worker(SERVED)
    yield made
    made.stop()


def wait_until(holds):
    latest = time.monotonic() + 60
    while not holds() and time.monotonic() < latest:
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("dies", r"ended its process \(exit code 7\)"),
        *slow([("hangs", "did not return within 0.5 s")]),
        ("keeps_the_interpreter", "did not return within 0.5 s"),
    ],
)
def test_a_process_that_a_call_killed_is_restarted(worker, how, words):
    first = worker.call("works", limit_s=60)
    with pytest.raises(Fault, match=words) as caught:
        worker.call(how, limit_s=10 if how == "dies" else 0.5)
    assert caught.value.timed_out == (how != "dies")
    assert worker.call("works", limit_s=60) != first
    assert worker.num_starts == 2


def test_a_process_survives_what_a_call_raises(worker):
    first = worker.call("works", limit_s=60)
    for arguments, words in [
        (("raises",), "raised ValueError: no luck"),
        ((lambda: 1,), "cannot send its samples to another process: it raised"),
    ]:
        with pytest.raises(Fault, match=words):
            worker.call(*arguments, limit_s=60)
    assert worker.call("works", limit_s=60) == first


@pytest.mark.parametrize(
    ("served", "words"),
    [
        (("nowhere.py:Served",), "not found: no such file"),
        ((SERVED.replace("Served", "Broken"), (3,)), r"rebuilt in another .* called sys.exit\(3\)"),
        ((SERVED, (1, 2)), r"rebuilt in another process: it raised TypeError"),
    ],
)
def test_what_cannot_be_rebuilt_is_a_fault(served, words):
    with pytest.raises(Fault, match=words):
        Worker(*served).call("works", limit_s=60)


def test_what_judges_model_written_text_has_no_keys(worker, monkeypatch):
    secret = ["OPENAI_API_KEY", "HF_TOKEN", "DSCHAT_API_KEYS", "AWS_ACCESS_KEY_ID", "db_password"]
    public = ["TOKENIZERS_PARALLELISM", "KEYBOARD", "LC_MONKEY"]
    for name in (*secret, *public):
        monkeypatch.setenv(name, "1")
    function = Killable(SERVED)
    assert function.call(60, "counts", secret) == 0
    assert function.call(60, "counts", [*public, "PATH"]) == 4
    assert worker.call("counts", secret, limit_s=60) == 5  # a user's function may need its own


def test_a_killed_process_restarts_while_another_one_serves(tmp_path):
    function = Killable(SERVED.replace("Served", "StartsTogether"), str(tmp_path))
    first = function.call(60, "works")
    with pytest.raises(Fault, match="no luck"):
        function.call(60, "raises")
    assert function.call(60, "works") == first
    assert function.call(0.2, "hangs") is None
    used = {function.call(60, "works")}
    wait_until(lambda: used.add(function.call(60, "works")) or len(used) > 1)
    assert len(used) == 2  # in turn
    assert first not in used
    assert len(list(tmp_path.iterdir())) == 3


def started(pids):
    """The id of the process that a function started, once it is written in full."""
    wait_until(lambda: pids.exists() and pids.read_text().endswith("\n"))
    return int(pids.read_text())


def ends(pid):
    """Whether process ``pid`` exits by itself; otherwise it is killed."""

    def is_over():
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        return state == "Z"  # exited, not yet reaped

    wait_until(is_over)
    if over := is_over():
        return over
    os.kill(pid, signal.SIGKILL)
    return False


@pytest.mark.parametrize("how", ["hangs", "dies"])
def test_child_processes_of_a_function_die_with_the_worker(how, worker, tmp_path):
    pids = tmp_path / "pids"
    worker.start()
    with pytest.raises(Fault, match="within 1 s" if how == "hangs" else "exit code 7"):
        worker.call("starts_another", str(pids), how, limit_s=1)
    assert ends(started(pids))


def test_child_processes_of_a_function_die_with_the_run(tmp_path):
    pids = tmp_path / "pids"
    code = (
        f"import os; from dschat.user_code.processes import Worker; worker = Worker({SERVED!r}); "
        f"worker.call('starts_another', {str(pids)!r}, 'works', limit_s=60); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 9
    assert ends(started(pids))


def orphan(before=""):
    """A worker process and our end of its pipe: nobody kills it."""
    ours, theirs = Pipe()
    end = theirs.fileno()
    code = f"from dschat.user_code import processes; {before}processes.serve({end})"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, pass_fds=[end])
    theirs.close()
    ours.send((SERVED, ()))
    assert ours.recv() is None
    return process, ours


def test_a_worker_exits_with_its_parent_during_a_call():
    """The parent neither closes the worker nor kills it: the pipe closes when it exits."""
    process, ours = orphan()
    ours.send(("hangs", 1000))
    ours.close()
    try:
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()


@pytest.mark.slow
def test_an_orphaned_worker_exits_though_its_function_holds_the_gil():
    """No parent kills it, and none of its threads can run."""
    process, ours = orphan("processes._GRACE_S = 0.9; ")
    ours.send(("works", 0.1))
    assert ours.recv() == process.pid
    time.sleep(1.1)  # the timer of a finished call is cancelled
    assert process.poll() is None
    busy = psutil.Process(process.pid).cpu_times().user
    ours.send(("keeps_the_interpreter", 0.1))
    wait_until(lambda: psutil.Process(process.pid).cpu_times().user > busy + 0.1)
    ours.close()
    try:
        assert process.wait(timeout=60) == 1
    finally:
        process.kill()


def fault_of(worker):
    """How a call that never ends does end."""
    try:
        return worker.call("hangs", limit_s=60)
    except BaseException as error:
        return error


def test_a_worker_that_is_stopped_beside_a_call():
    """The call fails, both close the pipe once, and no call after it starts a process."""
    for _ in range(2):
        worker, outcome = Worker(SERVED), []
        worker.start()
        close, closed = worker._pipe.close, []
        worker._pipe.close = lambda close=close, closed=closed: (closed.append(1), close())

        thread = threading.Thread(target=lambda w, o: o.append(fault_of(w)), args=(worker, outcome))
        thread.start()
        time.sleep(0.05)
        worker.stop()
        thread.join(30)
        assert [type(error) for error in outcome] == [Fault]
        assert closed == [1]
    with pytest.raises(Fault, match="was stopped"):
        worker.call("works", limit_s=10)
    assert (worker.is_alive, worker.num_starts) == (False, 1)
