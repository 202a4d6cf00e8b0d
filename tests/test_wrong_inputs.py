"""Wrong inputs: exit code 2, one line with the cause and the remedy, and no other output.

The table is ``mistakes.txt``. Its commands run as a user would run them, each in an empty
directory. Loading torch for each would take minutes, so they run as forks of one process that has
loaded it (see ``forked.py``). Those in `PLAIN` also run as separate processes, for the same output.
"""

import importlib.util
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import forked
import mistakes
import pytest
from quick import some

NAMES = [mistake.name for mistake in mistakes.mistakes(Path())]
LONG = {"no rejected answers, train.py"}  # starts a process that loads torch
QUICK = [name for name in NAMES[::24] if name not in LONG]  # the whole table is marked slow
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
    """Name -> outcome of the command, for all names that are parameters of tests."""
    items = [item for item in request.session.items if item.module is request.module]
    wanted = {item.callspec.params["name"] for item in items if hasattr(item, "callspec")}
    if any(item.originalname == "test_a_separate_process_gives_the_same_error" for item in items):
        wanted.update(PLAIN)
    names = [name for name in table if name in wanted]
    commands = [forked.Command(table[name].argv) for name in names]
    done = forked.run_all(folder, Path(mistakes.__file__), commands)
    return dict(zip(names, done, strict=True))


@pytest.mark.parametrize("name", some(NAMES, QUICK))
def test_a_mistake_is_one_line_and_exit_code_2(outcomes, table, name):
    if any(name.endswith(what) and here for what, here in NOT_HERE.items()):
        pytest.skip("not an error on this machine")
    outcome = outcomes[name]
    assert outcome.code == 2, outcome.stderr[-3000:]
    (line,) = outcome.stderr.splitlines()
    assert line.startswith("error: ")
    at = 0
    for piece in table[name].pieces:
        assert piece in line[at:], line
        at = line.index(piece, at) + len(piece)
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
