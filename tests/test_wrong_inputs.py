"""Wrong inputs: exit code 2, one line with the cause and the remedy, and no other output.

The table is ``mistakes.txt``. Its commands run as a user would run them, each in an empty
directory. Loading torch for each would take minutes, so they run as forks of one process that has
loaded it (see ``forked.py``); rows of `SECTIONS` quickly, in this process. Those in `PLAIN` also
run as separate processes, for the same output.
"""

import importlib.util
import logging
import os
import runpy
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import forked
import mistakes
import pytest
from quick import some

from dschat.__main__ import main_of
from dschat.config import UserError
from dschat.distributed import entrypoint

ROWS = mistakes.mistakes(Path())
NAMES = [row.name for row in ROWS]
SECTIONS = ("Flags", "YAML", "Devices and machines")  # of rows that need no model
EARLY = [row.name for row in ROWS if row.section in SECTIONS]
LONG = {"no rejected answers, train.py"}  # starts a process that loads torch
# Of those that load something, and one that does not; the whole table is marked slow.
QUICK = [name for name in NAMES if name not in {*EARLY, *LONG}][::24] + EARLY[:1]
PLAIN = (  # one per script and kind: flags, names, data, weights
    "unknown flag",
    "broken JSON line",
    "missing tensor",
    "SFT model as reward",
    "no rejected answers, train.py",
    "reward model, chat.py",
    "engine: strings",
)
NOT_HERE = {
    "without a GPU": Path("/dev/nvidiactl").exists(),
    "without wandb": importlib.util.find_spec("wandb") is not None,
    "without flash-attn": importlib.util.find_spec("flash_attn") is not None,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("wrong")


@pytest.fixture(scope="module")
def table(folder):
    return {mistake.name: mistake for mistake in mistakes.mistakes(folder)}


@pytest.fixture(scope="module")
def outcomes(folder, table, request):
    """Name -> outcome of the command, for all names that are parameters of tests with outcomes."""
    items = [item for item in request.session.items if item.module is request.module]
    items = [item for item in items if "outcomes" in item.fixturenames]
    wanted = {item.callspec.params["name"] for item in items if hasattr(item, "callspec")}
    if any(item.originalname == "test_a_separate_process_gives_the_same_error" for item in items):
        wanted.update(PLAIN)
    names = [name for name in table if name in wanted]
    commands = [forked.Command(table[name].argv) for name in names]
    done = forked.run_all(folder, Path(mistakes.__file__), commands)
    return dict(zip(names, done, strict=True))


def run_here(argv, monkeypatch):
    """Call the ``main`` of a command."""
    script, *words = argv
    if script == "-c":
        monkeypatch.setattr(entrypoint, "run", lambda main: main())
        exec(words[0], {"__name__": "__main__"})
    elif script == "-m" and words[0] == "dschat":
        monkeypatch.setattr(sys, "argv", words[1:])
        main_of(words[1])()
    elif script == "-m":
        monkeypatch.setattr(sys, "argv", words)
        runpy.run_module(f"{words[0]}.__main__", run_name="here")["main"]()
    else:
        monkeypatch.setattr(sys, "argv", argv)
        monkeypatch.syspath_prepend(str((forked.ROOT / script).parent))
        runpy.run_path(str(forked.ROOT / script), run_name="here")["main"]()


def skip_what_is_none_here(name):
    if any(name.endswith(what) and here for what, here in NOT_HERE.items()):
        pytest.skip("not an error on this machine")


def assert_says(line, pieces):
    at = 0
    for piece in pieces:
        assert piece in line[at:], line
        at = line.index(piece, at) + len(piece)


@pytest.fixture(scope="module")
def early(tmp_path_factory):
    """The table, with inputs that this process wrote."""
    folder = tmp_path_factory.mktemp("early")
    mistakes.write_inputs(folder)
    return {mistake.name: mistake for mistake in mistakes.mistakes(folder)}


@pytest.fixture
def surroundings(monkeypatch):
    """An empty standard input; what a command sets up for its log is restored."""
    logger = logging.getLogger("dschat")
    level, handlers = logger.level, [*logger.handlers]
    monkeypatch.setattr(logger, "handlers", handlers)
    monkeypatch.setattr(logger, "propagate", logger.propagate)
    with warnings.catch_warnings(), open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        yield
    logger.setLevel(level)


@pytest.mark.usefixtures("surroundings")
@pytest.mark.parametrize("name", EARLY)
def test_a_mistake_is_found_early(name, early, tmp_path, monkeypatch):
    skip_what_is_none_here(name)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        run_here(early[name].argv, monkeypatch)
    (line,) = f"error: {error.value}".splitlines()
    assert_says(line, early[name].pieces)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", some(NAMES, QUICK))
def test_a_mistake_is_one_line_and_exit_code_2(outcomes, table, name):
    skip_what_is_none_here(name)
    outcome = outcomes[name]
    assert outcome.code == 2, outcome.stderr[-3000:]
    (line,) = outcome.stderr.splitlines()
    assert line.startswith("error: ")
    assert_says(line, table[name].pieces)
    assert outcome.stdout == ""
    assert outcome.left == []


def test_the_inputs_are_unchanged(outcomes, folder, tmp_path):
    """Nothing was written beside them, such as a finished model's folder; Python may cache a module
    that it imports.
    """
    mistakes.write_files(tmp_path / "files")
    before, after = (
        sorted(
            str(path.relative_to(part))
            for path in (part / "files").rglob("*")
            if "__pycache__" not in path.parts
        )
        for part in (tmp_path, folder)
    )
    assert after == before


@pytest.mark.slow
def test_a_separate_process_gives_the_same_error(outcomes, table, folder, tmp_path):
    def run(name: str) -> subprocess.CompletedProcess:
        first, *words = table[name].argv
        script = [first] if first.startswith("-") else [str(forked.ROOT / first)]
        (tmp_path / name).mkdir()
        return subprocess.run(
            [sys.executable, *script, *words],
            cwd=tmp_path / name,
            env=forked.environment(folder),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )

    with ThreadPoolExecutor(2) as pool:
        done = dict(zip(PLAIN, pool.map(run, PLAIN), strict=True))
    for name, result in done.items():
        fork = outcomes[name]
        assert (result.returncode, result.stdout, result.stderr) == (2, "", fork.stderr), name
        assert list((tmp_path / name).iterdir()) == []
