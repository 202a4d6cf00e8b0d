"""Many commands in the time of one: an interpreter that has imported everything forks for each.

    python tests/forked.py FOLDER SETUP < commands.json > outcomes.json

Comes in: an empty folder, the file of a function ``write_inputs(folder)``, and a JSON list of argvs
(what follows ``python``: a script, ``-m MODULE`` or ``-c CODE``, and its words). Goes out: for each,
exit code, standard output and error, and the files that it left in its own working directory.

Importing torch, transformers, datasets and DeepSpeed takes 5 to 8 seconds a process, and these
commands stop before they do anything else. So the imports happen once, and each command is a fork
of that process: the script itself runs as ``__main__`` with its own ``sys.argv``, its own file
descriptors 0, 1 and 2, working directory and interpreter exit. What differs from a new process is
that the modules are there already. A fork is safe here because nobody has started a thread by then
(OMP_NUM_THREADS is 1, and the inputs are written in a fork too). ``test_wrong_inputs.py`` runs some
of the commands both ways.
"""

import json
import os
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMPORTS = (
    "dschat.deepspeed_setup",  # NOTE first: it tells DeepSpeed which accelerator there is
    "dschat.supervised",
    "dschat.rlhf.ppo",
    "dschat.rlhf.run",
    "dschat.rlhf.evaluation",
    "dschat.builtin_eval",
    "dschat.chat",
    "dschat.inference",
    "dschat.models.hf_generator",
    "dschat.data.tokenize",
    "dschat.data.show",
    "dschat.launch",
    "dschat.plan.run",
    "dschat.summary",
)


def run(argv: list[str], folder: Path) -> None:
    """Become ``python ARGV``; never returns."""
    work = folder / "work"
    work.mkdir(parents=True)
    os.chdir(work)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    first, *words = argv
    if first == "-c":
        sys.argv, sys.path[0] = ["-c", *words[1:]], ""
        exec(compile(words[0], "<string>", "exec"), {"__name__": "__main__"})
    elif first == "-m":
        sys.argv, sys.path[0] = words, os.getcwd()
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        script = str(ROOT / first)
        sys.argv, sys.path[0] = [script, *words], str(Path(script).parent)
        runpy.run_path(script, run_name="__main__")
    sys.exit()


def outcome(code: int, folder: Path) -> dict:
    return {
        "code": code,
        "stdout": (folder / "stdout").read_text(errors="replace"),
        "stderr": (folder / "stderr").read_text(errors="replace"),
        "left": sorted(str(p.relative_to(folder)) for p in (folder / "work").rglob("*")),
    }


def fork(child, *args) -> int:
    """Call ``child`` in a fork, which ends with it; returns its process id."""
    pid = os.fork()
    if pid == 0:
        child(*args)
        sys.exit()
    return pid


def main() -> None:
    folder, setup = Path(sys.argv[1]), sys.argv[2]
    commands = json.load(sys.stdin)
    for name in IMPORTS:
        __import__(name)
    write_inputs = runpy.run_path(setup)["write_inputs"]
    if os.waitpid(fork(write_inputs, folder), 0)[1]:
        sys.exit("the inputs could not be written")
    running: dict[int, int] = {}  # process id -> number of the command
    codes: dict[int, int] = {}
    waiting = list(enumerate(commands))
    while waiting or running:
        while waiting and len(running) < 2:
            number, argv = waiting.pop(0)
            running[fork(run, argv, folder / "runs" / str(number))] = number
        pid, status = os.wait()
        codes[running.pop(pid)] = os.waitstatus_to_exitcode(status)
    json.dump([outcome(codes[n], folder / "runs" / str(n)) for n in range(len(commands))], sys.stdout)


if __name__ == "__main__":
    main()
