"""Freed blocks are used again, until they are returned; the user's own settings stay."""

import subprocess
import sys

import pytest

CODE = """
import resource
import psutil
from dschat.startup.performance import keep_freed_memory, return_freed_memory

SIZE, PAGE = 64 << 20, 4096

def touch():
    block = bytearray(SIZE)
    block[::PAGE] = b"1" * (SIZE // PAGE)

keep_freed_memory()
touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    touch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
held = psutil.Process().memory_info().rss
return_freed_memory()
print(held - psutil.Process().memory_info().rss)
"""


def measured(tmp_path, **variables):
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)} | variables
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    faults, returned = map(int, done.stdout.split())
    return faults, returned


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_freed_blocks_are_kept_until_they_are_returned(tmp_path):
    pages = (64 << 20) // 4096
    faults, returned = measured(tmp_path)
    assert faults < pages // 4
    assert returned > 60 << 20
    faults, returned = measured(tmp_path, MALLOC_ARENA_MAX="8")  # the user tunes malloc
    assert faults > 3 * pages
    assert returned < 4 << 20
