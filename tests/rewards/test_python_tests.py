"""`python_tests`: the forms of tests, and answers that want another score than they deserve."""

import json
import os
import signal
import time

import pytest

from dschat.config import UserError
from dschat.rewards import code_tests, library
from dschat.rewards.code_tests import read_tests, run_tests
from dschat.rewards.library import PythonTests
from dschat.rewards.loader import load_reward_functions
from dschat.user_code.calls import Fault

MODES = ["namespaces", "user"] if os.getuid() == 0 else ["namespaces", "bwrap"]


def fenced(code):
    return f"Here it is:\n```python\n{code}\n```\n"


@pytest.fixture(scope="module")
def isolated():
    if code_tests.isolation() == "none":
        pytest.skip("nothing isolates processes here")
    return PythonTests(timeout_s=20.0, limit_s=60.0, memory_mib=256)


@pytest.fixture(params=[MODES[0], pytest.param(MODES[1], marks=pytest.mark.slow)])
def each_mode(request, isolated, monkeypatch):
    monkeypatch.setattr(library, "isolation", lambda: request.param)
    try:
        works = run_tests(
            "print(1)", [["run", "", "1"]], request.param, 5, 256, time.monotonic() + 9
        )
    except Fault:
        works = [False]
    if not works[0]:
        pytest.skip(f"{request.param} does not work here")
    return PythonTests(timeout_s=20.0, limit_s=60.0, memory_mib=256)


ADD = "def add(a, b):\n    return a + b"
SUM = "print(sum(map(int, input().split())))"
IN_CLASS = "class Solution:\n    def add(self, a, b):\n        return a + b"
CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate(0, 0) == 0"
ADDS = {"inputs": [[1, 2], [3, 4]], "outputs": [[3], 7], "fn_name": "add"}
SUMS = {"inputs": ["1 2\n", ["3 4"]], "outputs": ["3\n", "7"]}
OPEN_R1 = {"type": "stdin_stdout", "fn_name": None}
LCB = {"testtype": "functional", "metadata": {"func_name": "add"}}


@pytest.mark.parametrize(
    ("code", "tests", "more", "score"),
    [
        (ADD, ["assert add(1, 2) == 3", "assert add(1, 1) == 3"], {}, 0.5),  # MBPP
        (ADD, ["assert near(add(1, 2), 3)"], {"setup": ["from math import isclose as near"]}, 1),
        (ADD, ["assert math.isclose(add(0.1, 0.2), 0.3)"], {"setup": "import math"}, 1),
        (ADD, CHECK, {"entry_point": "add"}, 1),  # HumanEval
        (ADD, CHECK.replace("== 0", "== 1"), {"entry_point": "add"}, 0),
        (SUM, json.dumps(SUMS), {}, 1),  # APPS, TACO
        (ADD, json.dumps(ADDS), {}, 1),
        (IN_CLASS, ADDS, {}, 1),
        (SUM, {"test_cases": [{**OPEN_R1, "input": "1 2", "output": "3 \n\n"}]}, {}, 1),
        (SUM, json.dumps([{"input": "1 2", "output": "4", "testtype": "stdin"}]), {}, 0),
        (IN_CLASS, [{**LCB, "input": "1\n2", "output": "3"}], {}, 1),  # LiveCodeBench
        (IN_CLASS, [{"input": "1\n2", "output": "3"}], {"entry_point": "add"}, 1),
        (
            "def f(): return (1, [2.5, None], {3: {4}}, b'5', set())",
            ["assert f() == (1, [2.5, None], {3: {4}}, b'5', set())"],
            {},
            1,
        ),
        (
            "from collections import Counter\ndef f(x): return Counter(x)",
            ["assert f('aab') == {'a': 2, 'b': 1} and Counter('aab') == f('aab')"],
            {"setup": "from collections import Counter"},
            1,
        ),
        (
            "def f(x):\n    if x < 0: raise ValueError(x)\n    return x",
            ["try:\n    f(-1)\nexcept ValueError:\n    pass\nelse:\n    assert False"],
            {},
            1,
        ),
    ],
)
def test_forms_of_tests(isolated, code, tests, more, score):
    columns = {name: [value] for name, value in more.items()}
    assert isolated([fenced(code)], [tests], **columns) == [score]


def test_the_last_block_counts_and_rows_without_tests_have_no_score(isolated):
    answers = [fenced("x = 1") + fenced(ADD), ADD, f"```\n{ADD}\n```", fenced(ADD), "```python"]
    answers += [f"```text\nx\n```\n{fenced(ADD)}It prints\n```\n3\n```"]
    rows = [["assert add(1, 2) == 3"]] * 3 + [None, ["assert True"], ["assert add(1, 2) == 3"]]
    assert isolated(answers, rows) == [1, 0, 1, None, 0, 1]


def test_tests_in_another_form_fail_the_call():
    for tests in (7, [7], {"cases": []}, [{"input": "1"}]):
        with pytest.raises(Fault, match="cannot read"):
            read_tests(tests)


FORGED = [
    "class Any:\n    def __eq__(self, other): return True\n    __hash__ = object.__hash__\n"
    "def add(a, b): return Any()",
    "import sys\nsys.exit(0)",
    "import os\nos._exit(0)",
    "import builtins\nbuiltins.AssertionError = None\nbuiltins.isinstance = lambda *_: True\n"
    "def add(a, b): return None",
    "def add(a, b): raise StopIteration",
    "import sys, os\nsys.exit = os._exit = lambda *_: None\ndef add(a, b): sys.exit(0)",
    "class Zero(int):\n    def __eq__(self, other): return True\ndef add(a, b): return Zero(9)",
    "class Math:\n    def isclose(*_): return True\nmath = Math()\ndef all(x): return True\n"
    "def add(a, b): return 0",
    "import os\nfor fd in range(64):\n    try: os.write(fd, b'1' * 99)\n    except OSError: pass\n"
    "def add(a, b): return 0",
    "import os\nos.closerange(0, 64)\ndef add(a, b): return 3",
    "import gc, json\ndef add(a, b):\n    for o in gc.get_objects():\n"
    "        if type(o).__name__ == 'Link': o.send([3]); o.send(None); o.send('x')\n    return 0",
    "print('1' * 9, flush=True)\nprint('PASSED', 1.0)",
    "class Bad:\n    def __del__(self): raise SystemExit(0)\nBad()\n"
    "import atexit\natexit.register(print, 1)\nraise ValueError",
]


@pytest.mark.parametrize("code", FORGED)
def test_no_answer_forges_a_result(each_mode, code):
    tests = [
        "assert add(1, 2) == 3 and add(1, 3) == 4",
        "assert all(map(lambda x: add(x, 1) == x + 1, range(3)))",
        "assert math.isclose(add(0.5, 0.5), 1.0)",
    ]
    assert each_mode([fenced(code)], [tests]) == [0]
    assert each_mode([fenced(code)], [SUMS]) == [0]


HOSTILE = {
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "threads": "import threading, time\nwhile True:\n"
    "    try: threading.Thread(target=time.sleep, args=[99]).start()\n    except RuntimeError: 0",
    "endless output": "while True: print('x' * 10000)",
    "endless errors": "import sys\nwhile True: sys.stderr.write('x' * 10000)",
    "endless file": "f = open('x', 'w')\nwhile True: f.write('x' * 10000)",
    "memory": "x = []\nwhile True: x.append(bytearray(1 << 24))",
    "loop": "while True: pass",
    "sleep": "import time\ntime.sleep(99)",
    "C code": "9 ** 9 ** 9",
    "recursion": "f = lambda: f()\nimport sys\nsys.setrecursionlimit(10**9)\nf()",
    "parser": "(" * 100000,
    "surrogate": "x = '\ud800'",
    "null": "\0",
    "crash": "import ctypes\nctypes.string_at(0)",
    "stopped": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "group": "import os, signal\nos.killpg(0, signal.SIGKILL)",
    "parents": "import os, signal\nfor pid in range(1, os.getppid() + 3):\n"
    "    try: os.kill(pid, signal.SIGKILL)\n    except OSError: pass",
    "all": "import os, signal\nos.kill(-1, signal.SIGKILL)",
    "folder": "import os, shutil\nshutil.rmtree(os.getcwd())\nos.makedirs('/'.join(['d'] * 500))",
    "deep folder": "import os\nfor _ in range(3000):\n    os.mkdir('d')\n    os.chdir('d')",
    "session": "import os, time\nfor _ in range(9):\n    if not os.fork():\n        os.setsid()\n"
    "        time.sleep(99)\n        os._exit(0)",
    "ignored signals": "import signal\nfor s in range(1, 32):\n"
    "    try: signal.signal(s, signal.SIG_IGN)\n    except OSError: pass\nwhile True: pass",
    "kept exit": "import os, threading\nos._exit = lambda *_: None\nwhile True:\n    try:\n"
    "        while True: pass\n    except BaseException: pass",
}


# Those that use up their time limit; one of them is quick.
LONG = (
    "threads",
    "recursion",
    "ignored signals",
    "stopped",
    "endless errors",
    "sleep",
    "kept exit",
)
LONG += ("C code", "fork bomb")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in LONG else ()) for n in HOSTILE]
)
def test_hostile_answers_are_contained(each_mode, name):
    code, started = HOSTILE[name], time.monotonic()
    short = PythonTests(timeout_s=0.5, limit_s=20.0, memory_mib=256)
    assert short([fenced(code)], [[{"input": "1 2", "output": "3"}]]) == [0]
    assert short([fenced(f"{ADD}\n{code}")], [["assert add(1, 2) == 4"]]) == [0]
    assert time.monotonic() - started < 30
    assert each_mode([fenced(ADD)], [["assert add(1, 2) == 3"]]) == [1]  # the next is unharmed
    os.killpg(0, 0)  # this group is as it was
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_answers_read_and_write_nothing_outside(each_mode, tmp_path):
    """The namespaces hide the files; another user may not write them."""
    secret = tmp_path / "tests.json"
    secret.write_text("3")
    os.chmod(secret, 0o600)
    code = f"print(open({str(secret)!r}).read())"
    assert each_mode([fenced(code)], [[{"input": "", "output": "3"}]]) == [0]
    for place in (tmp_path, "/usr", "/", os.path.dirname(code_tests.__file__)):
        code = f"open('{place}/forged', 'w').write('x')\nprint(3)"
        assert each_mode([fenced(code)], [[{"input": "", "output": "3"}]]) == [0]
        assert not os.path.exists(f"{place}/forged")
    code = "open('mine', 'w').write('3')\nprint(open('mine').read())"
    assert each_mode([fenced(code)], [[{"input": "", "output": "3"}] * 2]) == [1]
    code = "import os\nprint([k for k in os.environ if 'TOKEN' in k])"
    assert each_mode([fenced(code)], [[{"input": "", "output": "[]"}]]) == [1]


def test_answers_see_no_network_and_no_process_or_file_of_others(isolated):
    if code_tests.isolation() == "user":
        pytest.skip("no namespaces here")
    code = "import socket\ntry:\n    socket.create_connection(('127.0.0.1', 1), 1)\n"
    code += "except OSError as e: print(e.errno)"  # ENETUNREACH, not ECONNREFUSED
    assert isolated([fenced(code)], [[{"input": "", "output": "101"}]]) == [1]
    code = "import os\nprint(os.getpid() < 9, os.path.exists('/etc/passwd'), os.listdir('.'))"
    assert isolated([fenced(code)], [[{"input": "", "output": "True False []"}]]) == [1]


def test_answers_die_first_where_memory_runs_out(monkeypatch):
    monkeypatch.setattr(library, "isolation", lambda: "none")  # which sees /proc
    code = "print(open('/proc/self/oom_score_adj').read())"
    function = PythonTests(timeout_s=20.0, unsafe=True)
    assert function([fenced(code)], [[{"input": "", "output": "1000"}]]) == [1]


@pytest.mark.slow
def test_an_answer_has_a_limit_of_time_for_all_its_tests(isolated):
    slow = PythonTests(timeout_s=2.0, limit_s=3.0)
    started = time.monotonic()
    tests = [{"input": "", "output": "1"}] * 50
    assert slow([fenced("while True: pass")], [tests]) == [0]
    assert time.monotonic() - started < 30
    slow = PythonTests(timeout_s=3.0)
    code = "import sys\nif input() == '1':\n    while True: pass\nprint(3)"
    tests = [{"input": number, "output": "3"} for number in ("1", "2", "3")]
    assert slow([fenced(code)], [tests]) == [2 / 3]  # only the test that hangs fails


def test_what_is_not_isolated_is_said_or_refused(monkeypatch, caplog):
    monkeypatch.setattr(library, "isolation", lambda: "user")
    PythonTests()
    assert "does not isolate answers from the network" in caplog.text
    monkeypatch.setattr(library, "isolation", lambda: "none")
    with pytest.raises(UserError, match="cannot isolate answers.*python_tests.unsafe=true"):
        PythonTests()
    (function,) = load_reward_functions(["python_tests"], (), ["python_tests.unsafe=true"], set())
    code, tests = fenced(ADD), ["assert add(1, 2) == 3"]
    assert function.function([code], [tests]) == [1]
    with pytest.raises(UserError, match="limits of time above 0"):
        PythonTests(timeout_s=0)
