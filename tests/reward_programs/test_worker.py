"""The process that calls functions: what it dies of, and that it outlives nobody."""

import subprocess
import sys
import time
from multiprocessing import Pipe
from pathlib import Path

import pytest

from dschat.reward_programs.worker import Died, Worker

ROOT = Path(__file__).parents[2]
BAD = Path(__file__).with_name("bad_functions.py")


def test_a_process_that_ends_in_a_call_has_died():
    worker = Worker([("spec", f"{BAD}:dies", {})])
    with pytest.raises(Died, match="exit code 7"):
        worker.call(0, {"prompts": ["p2"]}, [1], 10)
    assert worker.call(0, {"prompts": ["p1"]}, [1], 10) == [1.0]  # anew
    worker.close()


def test_a_process_ends_though_its_parent_is_gone_and_its_function_keeps_the_interpreter():
    """Nobody kills it, and no thread of it runs to notice."""
    ours, theirs = Pipe()
    end = theirs.fileno()
    code = f"from dschat.reward_programs import worker; worker._GRACE_S = 0.4; worker.serve({end})"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, pass_fds=[end])
    theirs.close()
    ours.send([("spec", f"{BAD}:keeps_the_interpreter", {})])
    assert ours.recv() is None
    ours.send((0, {"prompts": ["p1"]}, [1], 0.1))
    assert ours.recv() == [1.0]
    time.sleep(0.6)  # a call that is over ends nothing
    assert process.poll() is None
    ours.send((0, {"prompts": ["p2"]}, [1], 0.1))
    time.sleep(0.2)  # so that it computes when we are gone
    ours.close()
    try:
        assert process.wait(timeout=5) == 1
    finally:
        process.kill()
