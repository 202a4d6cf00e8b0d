"""Runs many commands fast: imports everything once, then forks for each command.

    python tests/forked.py FOLDER SETUP < commands.json > outcomes.json

FOLDER is empty, SETUP is a file with a function ``write_inputs(folder)``. A `Command` is the
arguments of ``python`` (a script, ``-m MODULE`` or ``-c CODE``, and its arguments), optionally with
a signal to send. An `Outcome` is its exit code, standard output and error, and the files in its
working directory, which starts empty. `run_all` is the same as a function.

Importing torch, transformers, datasets and DeepSpeed takes 5 to 8 seconds per process, and commands
that fail on a user's mistake do little else. So the imports happen once, and each command runs in a
fork: the script as ``__main__``, with its own ``sys.argv``, working directory, file descriptors 0,
1 and 2, and session. The fork is safe because the process has no other threads: OMP_NUM_THREADS is
1, and the inputs are written in a fork too. Differences to a new process: modules are already
imported, and the interpreter does not free them at exit. ``test_wrong_inputs.py`` runs some of the
commands both ways.
"""

import atexit
import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LONGEST_S = 100.0  # time limit of one command; it is killed then
IMPORTS = (
    "dschat.runtime.deepspeed_engine",  # NOTE first: it sets DeepSpeed's accelerator
    "dschat.supervised.loop",
    "dschat.rlhf.trainer",
    "dschat.rlhf.reporter",
    "dschat.rlhf.evaluation",
    "dschat.runtime.gold_eval",
    "dschat.chat.load",
    "dschat.inference",
    "dschat.inference.hf_generator",
    "dschat.data.tokenize",
    "dschat.data.inspect",
    "dschat.launch.run_plan",
    "dschat.launch.preflight",
    "dschat.estimate.run",
    "dschat.launch.summary",
)


@dataclass
class Command:
    """``signum`` is sent when all conditions hold: ``after_s`` seconds have passed, ``after_file``
    (relative to the working directory) exists and is not empty, standard error has ``after_text``.
    """

    argv: list[str]
    signum: int | None = None
    after_s: float = 0.0
    after_file: str = ""
    after_text: str = ""


@dataclass
class Outcome:
    """``left``: files and folders in the working directory; ``orphans``: a process survived."""

    code: int
    stdout: str
    stderr: str
    left: list[str]
    orphans: bool


def environment(folder: Path) -> dict[str, str]:
    """Environment of a command: this checkout, offline, one thread, caches below ``folder``."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "dist")]),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_DATASETS_CACHE": str(folder / "cache"),
    }


def run_all(folder: Path, setup: Path, commands: Sequence[Command]) -> list[Outcome]:
    """The outcome of each command; two run at a time."""
    done = subprocess.run(
        [sys.executable, __file__, str(folder), str(setup)],
        input=json.dumps([asdict(command) for command in commands]),
        env=environment(folder),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [Outcome(**outcome) for outcome in json.loads(done.stdout)]


# -- the process that forks


def main() -> None:
    folder, setup = Path(sys.argv[1]), sys.argv[2]
    commands = [Command(**command) for command in json.load(sys.stdin)]
    for name in IMPORTS:
        __import__(name)
    write_inputs = runpy.run_path(setup)["write_inputs"]
    if os.waitpid(_fork(write_inputs, folder), 0)[1]:
        sys.exit("the inputs could not be written")
    gc.freeze()  # so that garbage collection in a fork does not copy shared pages
    for finalizer in list(weakref.finalize._registry):
        finalizer.atexit = False  # torch's libraries: 40 ms of every fork's end
    outcomes: dict[int, Outcome] = {}
    running: dict[int, _Running] = {}
    while len(outcomes) < len(commands):
        number = len(outcomes) + len(running)
        if len(running) < 2 and number < len(commands):
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
    json.dump([asdict(outcomes[n]) for n in range(len(commands))], sys.stdout)


def _fork(child, *args) -> int:
    """Call ``child`` in a fork, which exits afterwards; returns the fork's process id."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = _exit_code(child, *args)
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)  # freeing every module would touch every page, for a second
    return pid


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
        (folder / "work").mkdir(parents=True)
        self._started, self._signalled = time.monotonic(), False
        self._stdin, writer = os.pipe()  # stays open if the command waits for a signal
        if command.signum is None:
            os.close(writer)
        self.pid = _fork(self._become)
        os.close(self._stdin)

    def _become(self) -> None:
        os.setsid()
        os.chdir(self._folder / "work")
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
        if seconds > LONGEST_S:
            os.killpg(self.pid, signal.SIGKILL)
        if command.signum is None or self._signalled or seconds < command.after_s:
            return
        file = self._folder / "work" / command.after_file
        if command.after_file and not (file.is_file() and file.stat().st_size):
            return
        if command.after_text in self._text("stderr"):
            os.kill(self.pid, command.signum)
            self._signalled = True

    def outcome(self, code: int) -> Outcome:
        work = self._folder / "work"
        left = sorted(str(path.relative_to(work)) for path in work.rglob("*"))
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
    main()
