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

from dschat.rewards.call import Fault
from dschat.rewards.processes import Killable, Worker, _functions

ROOT = Path(__file__).parents[2]
BAD = Path(__file__).with_name("bad_functions.py")


def test_a_process_that_ends_in_a_call_has_died():
    worker = Worker([("spec", f"{BAD}:dies", {})])
    with pytest.raises(Fault, match="exit code 7"):
        worker.call(0, {"prompts": ["p2"]}, [1], 10)
    assert worker.call(0, {"prompts": ["p1"]}, [1], 10) == [1.0]  # restarted
    worker.close()


class Environment:
    """Whether the process has variables."""

    def __call__(self, names):
        return [float(sum(name in os.environ for name in names))]


def test_what_judges_model_written_text_has_no_keys(monkeypatch):
    secret = ["OPENAI_API_KEY", "HF_TOKEN", "DSCHAT_API_KEYS", "AWS_ACCESS_KEY_ID", "db_password"]
    public = ["TOKENIZERS_PARALLELISM", "KEYBOARD", "LC_MONKEY"]
    for name in (*secret, *public):
        monkeypatch.setenv(name, "1")
    function = Killable(f"{__file__}:Environment")
    assert function.call(60, names=secret) == 0
    assert function.call(60, names=[*public, "PATH"]) == 4
    function._idle.get_nowait().close()
    own = Worker([("spec", f"{__file__}:Environment", {})])  # a user's function may need its own
    assert own.call(0, {"names": secret}, [1], 60) == [5]
    own.close()


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
def test_child_processes_of_a_function_die_with_the_worker(how, tmp_path):
    worker = Worker([("spec", f"{BAD}:starts_another", {})])
    pids = tmp_path / "pids"
    worker.start()
    with pytest.raises(Fault, match="within 1 s" if how == "hangs" else "exit code 7"):
        worker.call(0, {"path": str(pids), "how": how}, [1], 1)
    assert ends(started(pids))
    worker.close()


def test_child_processes_of_a_function_die_with_the_run(tmp_path):
    pids = tmp_path / "pids"
    code = (
        "import os; from dschat.rewards.processes import Worker; "
        f"worker = Worker([('spec', {str(BAD) + ':starts_another'!r}, {{}})]); "
        f"worker.call(0, {{'path': {str(pids)!r}, 'how': 'returns'}}, [1], 60); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 9
    assert ends(started(pids))


def wait_until(holds):
    latest = time.monotonic() + 60
    while not holds() and time.monotonic() < latest:
        time.sleep(0.01)


def test_a_worker_exits_with_its_parent_during_a_call():
    """The parent neither closes the worker nor kills it: the pipe closes when it exits."""
    ours, theirs = Pipe()
    end = theirs.fileno()
    code = f"from dschat.rewards import processes; processes.serve({end})"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, pass_fds=[end])
    theirs.close()
    ours.send((_functions, [("spec", f"{BAD}:hangs", {})]))
    assert ours.recv() is None
    ours.send((0, {"prompts": ["p2"]}, [1], 1000))
    ours.close()
    try:
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()


@pytest.mark.slow
def test_an_orphaned_worker_exits_though_its_function_holds_the_gil():
    """No parent kills it, and none of its threads can run."""
    ours, theirs = Pipe()
    end = theirs.fileno()
    code = f"from dschat.rewards import processes; processes._GRACE_S = 0.9; processes.serve({end})"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, pass_fds=[end])
    theirs.close()
    ours.send((_functions, [("spec", f"{BAD}:keeps_the_interpreter", {})]))
    assert ours.recv() is None
    ours.send((0, {"prompts": ["p1"]}, [1], 0.1))
    assert ours.recv() == [1.0]
    time.sleep(1.1)  # the timer of a finished call is cancelled
    assert process.poll() is None
    busy = psutil.Process(process.pid).cpu_times().user
    ours.send((0, {"prompts": ["p2"]}, [1], 0.1))
    wait_until(lambda: psutil.Process(process.pid).cpu_times().user > busy + 0.1)
    ours.close()
    try:
        assert process.wait(timeout=60) == 1
    finally:
        process.kill()


def fault_of(worker):
    """How a call that never ends does end."""
    try:
        return worker.call(0, {"prompts": ["p2"]}, [1], 60)
    except BaseException as error:
        return error


def test_a_worker_that_is_stopped_beside_a_call():
    """The call fails, both close the pipe once, and no call after it starts a process."""
    for _ in range(5):
        worker, outcome = Worker([("spec", f"{BAD}:hangs", {})]), []
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
        worker.call(0, {"prompts": ["p1"]}, [1], 10)
    assert (worker._process, worker.num_starts) == (None, 1)
