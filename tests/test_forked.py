"""Commands that run in forks die with the pytest process that asked for them."""

import subprocess
import sys

from forked import environment
from stub_steps import alive, wait_for

PYTEST = """
import sys
from pathlib import Path
import forked
forked.IMPORTS = ()
forked.run_ranks(["-c", sys.argv[2]], Path(sys.argv[1]), 60)
"""
RANK = """
import os
print(os.getpid(), os.getppid(), flush=True)
while True:
    pass
"""


def test_ranks_die_with_a_killed_pytest(tmp_path):
    command = [sys.executable, "-c", PYTEST, str(tmp_path), RANK]
    killed = subprocess.Popen(command, env=environment(tmp_path))
    outputs = [tmp_path / "runs" / rank / "stdout" for rank in ("0", "1")]
    assert wait_for(lambda: all(out.exists() and out.read_text() for out in outputs), 60)
    killed.kill()
    killed.wait()
    pids = {int(pid) for out in outputs for pid in out.read_text().split()}
    assert len(pids) == 3  # two ranks and the server
    assert wait_for(lambda: not any(alive(pid) for pid in pids), 5)
