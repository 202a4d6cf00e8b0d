"""Runs the code of an answer against tests, for the ready-made reward ``python_tests``.

Each answer has two processes (`sandbox` says why), isolated in the first of these ways that works
here: namespaces of the kernel, bwrap, a user of their own if this process is root's. They are
killed at the end, at each test that takes too long, and with this process.
"""

import functools
import json
import math
import os
import re
import secrets
import select
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from dschat.user_code.calls import Fault
from dschat.user_code.processes import START_S

Test = list[str]  # ["run", input, output] or ["code", source, ...]

_FENCE = re.compile(r"```([\w+-]*)[^\S\n]*\n(.*?)```", re.DOTALL)
NOT_ISOLATED = {  # isolation -> what it does not isolate
    "namespaces": "",
    "bwrap": "",
    "user": "the network, and files that everybody may read or write",
    "none": "the network, your files and your processes",
}
_FOLDER = "/sandbox"  # for files, where there are namespaces
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
_RESULTS = {b"1": True, b"0": False}


def share_passed(
    answer: str, tests: list[Test], mode: str, timeout_s: float, limit_s: float, memory_mib: int
) -> float:
    """The share of ``tests`` that the answer's last fenced block of Python passes; of several
    blocks, one that is said to be Python.
    """
    found = [(tag.lower(), block) for tag, block in _FENCE.findall(answer)]
    blocks = [block for tag, block in found if tag in ("python", "py", "python3")]
    blocks = blocks or [block for tag, block in found if not tag]
    results: list[bool] = []
    end = time.monotonic() + limit_s
    while blocks and len(results) < len(tests) and time.monotonic() < end:
        left = tests[len(results) :]
        results += run_tests(blocks[-1], left, mode, timeout_s, memory_mib, end)
    return sum(results) / len(tests)


def read_tests(tests: Any, setup: Any = None, entry_point: str | None = None) -> list[Test]:
    """The tests of a row, of these forms, or JSON of one.

    Python: code, a list of codes; ``entry_point``: of ``check(candidate)``, as HumanEval's tests.
    Pairs: {inputs, outputs, fn_name}, a list of {input, output, fn_name or metadata.func_name}, or
    either below test_cases.

    Raises:
        Fault: another form.
    """
    if isinstance(tests, str):
        tests = _from_json(tests, [tests])
    if isinstance(tests, dict) and "test_cases" in tests:
        return read_tests(tests["test_cases"], setup, entry_point)
    if isinstance(tests, dict) and "inputs" in tests:
        pairs = zip(tests["inputs"], tests["outputs"], strict=True)
        return [_pair(*pair, tests.get("fn_name") or entry_point) for pair in pairs]
    if not isinstance(tests, list) and tests is not None:
        raise Fault(f"cannot read tests: {tests!r:.80}")
    before = [setup] if isinstance(setup, str) else [*(setup or ())]
    found = list[Test]()
    for test in tests or ():
        if isinstance(test, str):
            check = [f"check({entry_point})"] if entry_point else []
            found.append(["code", *before, test, *check])
        elif isinstance(test, dict) and {"input", "output"} <= test.keys():
            name = test.get("fn_name") or (test.get("metadata") or {}).get("func_name")
            is_program = str(test.get("type") or test.get("testtype")).startswith("stdin")
            name = None if is_program else name or entry_point
            found.append(_pair(test["input"], test["output"], name))
        else:
            raise Fault(f"cannot read a test: {test!r:.80}")
    return found


def _pair(given: Any, expected: Any, name: str | None) -> Test:
    """A test with texts for a program, or values for the function ``name``."""
    if not name:
        texts = ("\n".join(t) if isinstance(t, list) else str(t) for t in (given, expected))
        return ["run", *texts]
    if isinstance(given, str):  # LiveCodeBench: an argument a line, as JSON
        given = [_from_json(line, line) for line in given.splitlines()]
    expected = _from_json(expected, expected)
    right = [expected]  # or, in APPS, a list of it
    right += expected if isinstance(expected, list) and len(expected) == 1 else []
    names = "inf, nan = float('inf'), float('nan')"
    return ["code", names, f"assert as_lists({name}(*{given!r})) in {right!r}"]


def _from_json(value: Any, otherwise: Any) -> Any:
    try:
        return json.loads(value)
    except (ValueError, TypeError, RecursionError):
        return otherwise


# -- processes -------------------------------------------------------------------------------------


def run_tests(
    code: str, tests: list[Test], mode: str, timeout_s: float, memory_mib: int, end: float
) -> list[bool]:
    """The results of the first tests, at least one: up to one that fails by taking too long, or to
    the time ``end``.
    """
    with ExitStack() as stack:
        ends = socket.socketpair()
        results, written = os.pipe()
        own = [stack.enter_context(end_) for end_ in ends]
        stack.callback(os.close, results)
        limits = {"AS": memory_mib << 20, "FSIZE": 1 << 24, "NPROC": 16, "NOFILE": 64, "CORE": 0}
        setting = {"mode": mode, "limits": limits, "cpu_s": math.ceil(timeout_s) + 1}
        jobs = ({"code": code}, own[0], ()), ({"tests": tests}, own[1], (written,))
        try:
            for job, link, more in jobs:
                stack.enter_context(_process(job, link, more, setting))
        finally:
            os.close(written)
            for link in own:
                link.close()
        found = list[bool]()
        ready = select.poll()
        ready.register(results, select.POLLIN)
        limit_s = START_S
        while len(found) < len(tests):
            signs = os.read(results, 1) if ready.poll(limit_s * 1000) else b""
            if signs not in _RESULTS and signs != b"s":
                if limit_s == START_S:
                    raise Fault(f"its processes do not start ({mode})")
                return [*found, False]
            found += [_RESULTS[signs]] if signs in _RESULTS else []
            limit_s = max(0.001, min(timeout_s, end - time.monotonic()))
        return found


@contextmanager
def _process(
    job: dict[str, Any], link: socket.socket, more: tuple[int, ...], setting: dict[str, Any]
) -> Iterator[None]:
    """A process of `sandbox` with ``job``; at the end, neither it nor what it started is left."""
    mode, folder = setting["mode"], _FOLDER
    # a user for each process: limits of processes, and signals, are by user
    has_own = os.getuid() == 0 and mode in ("namespaces", "user")
    uid = (1 << 30) + secrets.randbelow(1 << 29) if has_own else 0
    if mode in ("user", "none"):
        folder = tempfile.mkdtemp(prefix="python_tests-")
        os.chown(folder, uid or -1, -1)
    own: dict[str, Any] = {
        "folder": folder,
        "uid": uid,
        "link": link.fileno(),
        "results": [*more, 0][0],
    }
    own |= {"readable": _readable(), "packages": sysconfig.get_path("purelib")}
    code = (
        f"import sys; sys.path.append({str(Path(__file__).parent)!r}); import sandbox; "
        f"sys.path.pop(); sandbox.main({ascii(setting | own)!r})"
    )
    python = [os.path.realpath(sys.executable), "-I", "-S", "-X", "utf8", "-c"]
    process = subprocess.Popen(
        [*_bwrap(mode), *python, code],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=_ENVIRONMENT | {"TMPDIR": folder},
        pass_fds=[link.fileno(), *more],
        start_new_session=True,
    )
    try:
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin as file:
            file.write(ascii(job).encode())
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if mode == "user":
            kill = f"import os; os.setresuid({uid}, {uid}, {uid}); os.kill(-1, 9)"
            subprocess.run([*python, kill], stderr=subprocess.DEVNULL)
        if folder != _FOLDER:
            subprocess.run(["rm", "-rf", folder], stderr=subprocess.DEVNULL)  # at any depth


@functools.cache
def _readable() -> list[str]:
    """What a process can read: Python, its packages, and the system's libraries."""
    own = [sys.base_prefix, sysconfig.get_path("purelib"), str(Path(__file__).parent)]
    system = ["/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/dev/null"]
    above = [f"{path}/" for path in (*own, *system)]
    return [
        path
        for path in dict.fromkeys([*system, *own])
        if os.path.lexists(path) and not any(path.startswith(other) for other in above)
    ]


def _bwrap(mode: str) -> list[str]:
    """The command that starts another one isolated, for mode bwrap."""
    if mode != "bwrap":
        return []
    binds = []
    for path in _readable():
        is_link = os.path.islink(path)
        binds += ["--symlink", os.readlink(path), path] if is_link else ["--ro-bind", path, path]
    ends = ["--dev", "/dev", "--tmpfs", _FOLDER, "--unshare-all", "--die-with-parent"]
    return ["bwrap", *binds, *ends, "--cap-drop", "ALL", "--remount-ro", "/"]


@functools.cache
def isolation() -> str:
    """The first way to isolate processes that works here; none: none does."""
    # NOTE no bwrap for root, whose processes are not limited in number
    modes = ("namespaces", "user") if os.getuid() == 0 else ("namespaces", "bwrap")
    end = time.monotonic() + START_S
    for mode in modes:
        with suppress(Fault, OSError):
            if run_tests("import heapq\nprint(1)", [["run", "", "1"]], mode, 30, 1024, end)[0]:
                return mode
    return "none"
