"""The wait policy of OpenMP is set before torch loads, whichever way dschat is used; freed blocks
are used again, until they are returned. The user's own settings stay.
"""

import sys

import pytest
from python_process import environment, python
from quick import slow, some

# Prints the policy as libgomp will read it, at the moment when torch is first imported.
HOOK = """
import os, sys
class Hook:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print("policy", os.environ.get("GOMP_SPINCOUNT"), flush=True)
            os._exit(0)
sys.meta_path.insert(0, Hook())
sys.argv = sys.argv[1:]
"""
SCRIPT = HOOK + "import runpy; runpy.run_path(sys.argv[0], run_name='__main__')"
MODEL = "builtin/tiny"
USES = {
    "engine": (HOOK + "from dschat.inference import InferenceEngine", []),
    "notebook": (HOOK + "from dschat import DeepSpeedRLHFEngine", []),
    "chat.py": (SCRIPT, ["chat.py", "--path", MODEL]),
    "step 1": (SCRIPT, ["step1_sft/main.py", "--model_name_or_path", MODEL, "--output_dir", "o"]),
}


def output_of(code, arguments, **variables):
    env = {k: v for k, v in environment().items() if not k.startswith(("GOMP", "OMP"))}
    done = python("-c", code, *arguments, env=env | variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("use", some(USES, ["step 1"]))
def test_the_policy_is_set_before_torch_loads(use):
    code, arguments = USES[use]
    assert output_of(code, arguments) == "policy 1000"


@pytest.mark.parametrize(
    "variables", [{"GOMP_SPINCOUNT": "7"}, *slow([{"OMP_WAIT_POLICY": "active"}])]
)
def test_the_users_policy_stays(variables):
    count = variables.get("GOMP_SPINCOUNT")
    assert output_of(USES["engine"][0], [], **variables) == f"policy {count}"


ALLOCATES = """
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
    done = python("-c", ALLOCATES, env=env, cwd=tmp_path)
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
