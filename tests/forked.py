"""Runs many commands fast: a server imports everything once, then forks for each command.

A `Command` is the arguments of ``python`` (a script, ``-m MODULE`` or ``-c CODE``, and its
arguments), optionally with environment variables, a signal to send, a working directory. An
`Outcome` is its exit code, standard output and error, and the files in its working directory, which
starts empty where none is given. `run_all` runs commands, two at a time: a test's two ranks are two
commands.

Importing torch, transformers, datasets and DeepSpeed takes 5 to 8 seconds per process, and many
tested commands do little else. So the imports happen once per pytest process, and each command runs
in a fork: the script as ``__main__``, with its own ``sys.argv``, environment, working directory,
file descriptors 0, 1 and 2, and session. The fork is safe because the server has no other threads:
OMP_NUM_THREADS is 1, and inputs are written in a fork too. Differences to a new process: modules
are already imported, the interpreter does not free them at exit, and a fork is killed when the
server dies, as the server is when pytest does. ``test_wrong_inputs.py`` runs some of the commands
both ways.
"""

import atexit
import ctypes
import gc
import json
import os
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LAUNCHERS = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
LONGEST_S = 100.0  # time limit of one command; it is killed then
TOGETHER = 2  # commands
PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
IMPORTS = (
    "dschat.runtime.deepspeed_engine",  # NOTE first: it sets DeepSpeed's accelerator
    "dschat.runtime.start",
    "dschat.supervised.loop",
    "dschat.supervised.setup",
    "dschat.rlhf.trainer",
    "dschat.rlhf.reporter",
    "dschat.rlhf.evaluation",
    "dschat.runtime.gold_eval",
    "dschat.chat.load",
    "dschat.inference",
    "dschat.inference.generators.hf_generator",
    "dschat.data.tokenize",
    "dschat.data.inspect",
    "dschat.launch.run_plan",
    "dschat.launch.preflight",
    "dschat.estimate.report",
    "dschat.launch.summary",
    "deepspeed.runtime.zero.stage3",  # with torch's compiler
    "deepspeed.ops.adam",
    "deepspeed.moe.utils",
    "transformers.models.llama.modeling_llama",
)


@dataclass
class Command:
    """``signum`` is sent when all conditions hold: the command handles SIGTERM, ``after_s`` seconds
    have passed, ``after_file`` (relative to the working directory) exists and is not empty,
    standard error has ``after_text``.
    """

    argv: list[str]
    signum: int | None = None
    after_s: float = 0.0
    after_file: str = ""
    after_text: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    cwd: str = ""  # "": a new folder
    limit_s: float = LONGEST_S


@dataclass
class Outcome:
    """``left``: files and folders in the working directory; ``orphans``: a process survived."""

    code: int
    stdout: str
    stderr: str
    left: list[str]
    orphans: bool


def environment(folder: Path) -> dict[str, str]:
    """Environment of a command: this checkout, offline, one thread, one process, caches below
    ``folder``.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
    return inherited | {
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests/dist"))),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_DATASETS_CACHE": str(folder / "cache"),
    }


def run_all(folder: Path, setup: Path | None, commands: Sequence[Command]) -> list[Outcome]:
    """The outcome of each command. ``folder``: for their new folders, and for what the function
    ``write_inputs(folder)`` of the file ``setup`` writes first.
    """
    server = _server()
    request = (str(folder), setup and str(setup), [asdict(command) for command in commands])
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    answer = server.stdout.readline()
    assert answer, Path(server.args[2]).read_text()[-4000:]
    return [Outcome(**outcome) for outcome in json.loads(answer)]


def run_ranks(argv: list[str], folder: Path, limit_s: float) -> list[Outcome]:
    """The outcomes of the two processes of a distributed command; ``folder`` is new."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    ranks = [job | {"RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1")]
    return run_all(folder, None, [Command(argv, variables=r, limit_s=limit_s) for r in ranks])


def run(*argv: str, **options: Any) -> Outcome:
    """The outcome of one command; ``options``: fields of `Command`."""
    with tempfile.TemporaryDirectory() as folder:
        (outcome,) = run_all(Path(folder), None, [Command(list(argv), **options)])
    return outcome


@cache
def _server() -> subprocess.Popen:
    """This process's server. It exits when its standard input closes, as at this one's exit, and
    is killed when this one is.
    """
    folder = Path(tempfile.mkdtemp(prefix="forked-"))
    log = folder / "server.log"
    with log.open("w") as errors:
        server = subprocess.Popen(
            [sys.executable, __file__, str(log), str(os.getpid()), *IMPORTS],
            env=environment(folder),
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    atexit.register(_close, server, folder)
    return server


def _close(server: subprocess.Popen, folder: Path) -> None:
    server.stdin.close()
    server.wait()
    shutil.rmtree(folder, ignore_errors=True)


# -- the process that forks


def main(_log: str, parent: str, *imports: str) -> None:
    _die_with(int(parent))
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    gc.disable()
    for name in imports:
        __import__(name)
    gc.freeze()  # so that garbage collection in a fork does not copy shared pages
    gc.enable()
    for finalizer in list(weakref.finalize._registry):
        finalizer.atexit = False  # torch's libraries: 40 ms of every fork's end
    for request in requests:
        folder, setup, commands = json.loads(request)
        if setup and os.waitpid(_fork(_write_inputs, setup, Path(folder)), 0)[1]:
            sys.exit("the inputs could not be written")
        outcomes = _outcomes(Path(folder), [Command(**command) for command in commands])
        print(json.dumps([asdict(outcome) for outcome in outcomes]), file=answers, flush=True)


def _write_inputs(setup: str, folder: Path) -> None:
    runpy.run_path(setup)["write_inputs"](folder)


def _outcomes(folder: Path, commands: list[Command]) -> list[Outcome]:
    outcomes: dict[int, Outcome] = {}
    running: dict[int, _Running] = {}
    while len(outcomes) < len(commands):
        number = len(outcomes) + len(running)
        if len(running) < TOGETHER and number < len(commands):
            run = _Running(number, commands[number], folder / "runs" / str(number))
            running[run.pid] = run
            continue
        for run in running.values():
            run.poll()
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            run = running.pop(pid)
            outcomes[run.number] = run.outcome(os.waitstatus_to_exitcode(status))
        else:
            time.sleep(0.01)
    return [outcomes[number] for number in range(len(commands))]


def _fork(child, *args) -> int:
    """Call ``child`` in a fork, which exits afterwards; returns the fork's process id."""
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            _die_with(parent)
            code = _exit_code(child, *args)
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)  # freeing every module would touch every page, for a second
    return pid


def _die_with(parent: int) -> None:
    """Have this process killed when ``parent``, which started it, dies: a rank whose peers are gone
    may wait for them for ever.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os._exit(1)


def _exit_code(child, *args) -> int:
    """The exit code of ``child``, with Python's handling of SystemExit and exceptions."""
    try:
        child(*args)
    except SystemExit as stop:
        if isinstance(stop.code, int | None):
            return stop.code or 0
        sys.stderr.write(f"{stop.code}\n")
        return 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


class _Running:
    """A command in its fork."""

    def __init__(self, number: int, command: Command, folder: Path) -> None:
        self.number, self._command, self._folder = number, command, folder
        self._work = Path(command.cwd or folder / "work")
        folder.mkdir(parents=True)
        self._work.mkdir(exist_ok=True)
        self._started, self._signalled = time.monotonic(), False
        self._stdin, writer = os.pipe()  # stays open if the command waits for a signal
        if command.signum is None:
            os.close(writer)
        self.pid = _fork(self._become)
        os.close(self._stdin)

    def _become(self) -> None:
        os.setsid()
        os.chdir(self._work)
        os.environ.update(self._command.variables)
        os.dup2(self._stdin, 0)
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(self._folder / name, os.O_WRONLY | os.O_CREAT), number)
        first, *words = self._command.argv
        if first == "-c":
            sys.argv, sys.path[0] = ["-c", *words[1:]], ""
            exec(compile(words[0], "<string>", "exec"), {"__name__": "__main__"})
        elif first == "-m":
            sys.argv, sys.path[0] = words, os.getcwd()
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        else:
            script = ROOT / first
            sys.argv, sys.path[0] = [str(script), *words], str(script.parent)
            runpy.run_path(str(script), run_name="__main__")

    def poll(self) -> None:
        """Send the signal if its conditions hold; kill a command over the time limit."""
        seconds, command = time.monotonic() - self._started, self._command
        if seconds > command.limit_s:
            os.killpg(self.pid, signal.SIGKILL)
        if command.signum is None or self._signalled or seconds < command.after_s:
            return
        file = self._work / command.after_file
        if command.after_file and not (file.is_file() and file.stat().st_size):
            return
        if command.after_text in self._text("stderr") and self._catches(signal.SIGTERM):
            os.kill(self.pid, command.signum)
            self._signalled = True

    def _catches(self, signum: int) -> bool:
        """Whether the command has set its handler of a signal: on a busy machine it may not yet."""
        text = Path(f"/proc/{self.pid}/status").read_text()
        (mask,) = re.findall(r"SigCgt:\s*(\w+)", text)
        return bool(int(mask, 16) >> (signum - 1) & 1)

    def outcome(self, code: int) -> Outcome:
        left = sorted(str(path.relative_to(self._work)) for path in self._work.rglob("*"))
        return Outcome(code, self._text("stdout"), self._text("stderr"), left, self._kill_group())

    def _kill_group(self) -> bool:
        """Kill the session's remaining processes; whether there were any."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    def _text(self, name: str) -> str:
        file = self._folder / name
        return file.read_text(errors="replace") if file.exists() else ""


if __name__ == "__main__":
    main(*sys.argv[1:])
