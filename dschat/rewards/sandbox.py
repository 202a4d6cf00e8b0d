"""Runs in two processes of their own what a model wrote, and the tests of it: see `code_tests`.

No answer can forge a result, for the two share no memory, files, signals or user. The process of
the tests has the tests, and writes the results into a pipe that the other one has not. The process
of the answer is sent inputs and arguments, and returns what was printed, or Python's literals: no
object with an ``__eq__`` of its own. All that it can send is a value that is right, or a wrong one.

Nothing of dschat is imported here: processes should start fast.
"""

import ast
import builtins
import ctypes
import os
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

LONGEST = 1 << 23  # bytes of a message
_libc = ctypes.CDLL(None, use_errno=True)


class Link:
    """Messages as lines of literals, of which each waits for its reply: buffers hold one."""

    def __init__(self, descriptor: int) -> None:
        self._file = os.fdopen(descriptor, "rb")

    def send(self, message: Any) -> None:
        data = ascii(message).encode() + b"\n"
        while data:
            data = data[os.write(self._file.fileno(), data) :]

    def receive(self) -> Any:
        line = self._file.readline(LONGEST)
        if not line.endswith(b"\n"):
            raise EOFError
        return ast.literal_eval(line.decode())


def main(arguments: str) -> NoReturn:
    """``arguments``: as a literal, see `code_tests`; the job is all of standard input, likewise."""
    setting = ast.literal_eval(arguments)
    with open(0, closefd=False) as stdin:
        job = ast.literal_eval(stdin.read())
    link = Link(setting["link"])
    _isolate(setting)
    nothing = os.open("/dev/null", os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    for file in {*range(3, 64)} - {setting["link"], setting["results"]}:
        with suppress(OSError):
            os.close(file)
    for name, limit in setting["limits"].items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    with suppress(AttributeError):  # of old releases
        sys.set_int_max_str_digits(0)
    sys.path.append(setting["packages"])
    with suppress(EOFError, OSError):
        if "code" in job:
            _serve_answer(job["code"], link, setting)
        else:
            _judge(job["tests"], link, setting["results"])
    os._exit(0)


# -- isolation -------------------------------------------------------------------------------------


def _done(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _isolate(setting: dict[str, Any]) -> None:
    """Leave the system behind, as far as ``mode`` says, and all privileges."""
    _libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    with suppress(OSError):  # where memory runs out, these processes die first
        os.write(os.open("/proc/self/oom_score_adj", os.O_WRONLY), b"1000")
    uid, gid = os.getuid(), os.getgid()
    is_root = uid == 0
    if setting["mode"] == "namespaces":
        # files, processes, network, IPC, host name; a user namespace allows it to others than root
        _done(_libc.unshare(0x6C020000 | (0 if is_root else 0x10000000)))
        if not is_root:
            maps = (
                ("setgroups", "deny"),
                ("uid_map", f"{uid} {uid} 1"),
                ("gid_map", f"{gid} {gid} 1"),
            )
            for name, text in maps:
                os.write(os.open(f"/proc/self/{name}", os.O_WRONLY), text.encode())
        if child := os.fork():
            os.waitpid(child, 0)
            os._exit(0)
        _new_root("/proc", setting["folder"], setting["readable"])
    os.chdir(setting["folder"])
    if is_root and setting["uid"]:
        os.setgroups([])
        os.setresgid(*[setting["uid"]] * 3)
        os.setresuid(*[setting["uid"]] * 3)
    elif setting["mode"] == "namespaces":
        header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        _done(_libc.capset(header, none))
    _libc.prctl(1, signal.SIGKILL)  # again: a change of the user clears it
    _done(_libc.prctl(38, 1, 0, 0, 0))  # PR_SET_NO_NEW_PRIVS


def _new_root(root: str, folder: str, readable: list[str]) -> None:
    """A root at ``root``, which hides what was there: ``readable``, and an empty folder."""

    def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
        _done(_libc.mount(*(t.encode() for t in (source, target, kind)), flags, data.encode()))

    mount("", "/", "", 0x44000)  # MS_REC | MS_PRIVATE
    mount("tmpfs", root, "tmpfs", 2, "mode=755")  # MS_NOSUID
    for path in readable:
        place = root + path
        os.makedirs(os.path.dirname(place), exist_ok=True)
        if os.path.islink(path):
            os.symlink(os.readlink(path), place)
            continue
        if os.path.isdir(path):
            os.makedirs(place, exist_ok=True)
        else:
            os.mknod(place)
        mount(path, place, "", 0x5000)  # MS_BIND | MS_REC
    os.mkdir(root + folder)
    # mount_setattr, recursive: read-only, no set-uid programs
    attributes = (ctypes.c_uint64 * 4)(0x3)
    _done(_libc.syscall(442, -100, root.encode(), 0x8000, attributes, 32))
    mount("tmpfs", root + folder, "tmpfs", 6, "mode=1777,size=64m")  # MS_NOSUID | MS_NODEV
    os.chroot(root)


# -- the answer ------------------------------------------------------------------------------------


def _serve_answer(code: str, link: Link, setting: dict[str, Any]) -> NoReturn:
    """Run the answer anew, in a process of its own, for each test."""
    link.send(link.receive())  # ready
    while True:
        kind, *text = link.receive()
        files = [os.memfd_create(name) for name in ("in", "out")]
        if kind == "run":
            os.write(files[0], text[0].encode(errors="surrogatepass"))
            os.lseek(files[0], 0, os.SEEK_SET)
        if not (child := os.fork()):
            status = 1
            with suppress(BaseException):
                resource.setrlimit(resource.RLIMIT_CPU, (setting["cpu_s"],) * 2)
                status = _run(code, files) if kind == "run" else _answer(code, link)
            os._exit(status)
        status = os.waitpid(child, 0)[1]
        _end_others(setting["mode"])
        output = os.pread(files[1], LONGEST // 8, 0)
        for file in files:
            os.close(file)
        link.send(output.decode(errors="replace") if kind == "run" and status == 0 else None)


def _end_others(mode: str) -> None:
    """Kill what a test has left running."""
    with suppress(OSError):
        if mode != "none":
            os.kill(-1, signal.SIGKILL)
        while True:
            os.waitpid(-1, 0)


def _run(code: str, files: list[int]) -> int:
    """The exit code of the answer as a program, from and to ``files``."""
    for stream, file in enumerate(files):
        os.dup2(file, stream)
    try:
        exec(compile(code, "answer.py", "exec"), {"__name__": "__main__"})
        status = 0
    except SystemExit as exit:
        status = int(exit.code not in (None, 0))
    sys.stdout.flush()
    return status


def _answer(code: str, link: Link) -> int:
    """Serve calls of the answer's functions, or of its ``Solution``'s methods."""
    names: dict[str, Any] = {"__name__": "answer"}
    exec(compile(code, "answer.py", "exec"), names)
    link.send("ready")
    while (request := link.receive()) is not None:
        name, positional, named = request
        try:
            is_method = name not in names and "Solution" in names
            function = getattr(names["Solution"](), name) if is_method else names[name]
            reply: Any = [_plain(function(*positional, **named))]
            ast.literal_eval(ascii(reply))
        except BaseException as error:
            reply = type(error).__name__, str(error)
        link.send(reply)
    return 0


def _plain(value: Any) -> Any:
    """``value`` without subclasses, such as Counter."""
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    of = next((kind for kind in (list, tuple, set) if isinstance(value, kind)), None)
    return of(map(_plain, value)) if of else value


# -- the tests -------------------------------------------------------------------------------------


class _Names(dict[str, Any]):
    """Names of a test: Python's own come before the answer's, which cannot replace them."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__(__name__="tests", as_lists=_as_lists)
        self._call = call

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        if name in sys.stdlib_module_names:
            return __import__(name)
        return lambda *positional, **named: self._call(name, positional, named)


def _judge(tests: list[list[Any]], link: Link, results: int) -> None:
    """Write 1 or 0 for each test; s once both processes are ready."""
    link.send("ready")
    link.receive()
    os.write(results, b"s")
    for kind, *test in tests:
        passed = False
        with suppress(BaseException):
            passed = _prints(link, *test) if kind == "run" else _holds(link, *test)
        os.write(results, b"1" if passed else b"0")


def _prints(link: Link, text: str, expected: str) -> bool:
    """Whether the answer prints ``expected``, but for spaces at the ends of lines and texts."""
    link.send(["run", text])
    output = link.receive()
    lines = [[line.strip() for line in t.strip().splitlines()] for t in (output, expected)]
    return lines[0] == lines[1]


def _holds(link: Link, *sources: str) -> bool:
    """Whether the code of a test runs through."""
    is_over = False

    def call(*request: Any) -> Any:
        nonlocal is_over
        link.send(request)
        reply = link.receive()
        is_over = reply is None  # its process ended
        if len(reply) == 1:
            return reply[0]
        error: Any = getattr(builtins, reply[0], None)
        # NOTE a StopIteration would end a loop of the test, all(map(...)) for one, as if it held.
        is_safe = (
            isinstance(error, type) and issubclass(error, Exception) and "Stop" not in reply[0]
        )
        raise (error if is_safe else RuntimeError)(reply[1])

    link.send(["begin"])
    if link.receive() is None:  # its code raises or exits
        return False
    names = _Names(call)
    try:
        for source in sources:
            exec(compile(source, "tests.py", "exec"), names)
        return True
    finally:
        if not is_over:
            link.send(None)
            link.receive()


def _as_lists(value: Any) -> Any:
    """``value`` as JSON has it: with lists in place of tuples."""
    if isinstance(value, (list, tuple)):
        return [_as_lists(v) for v in value]
    return {k: _as_lists(v) for k, v in value.items()} if isinstance(value, dict) else value
