"""Code that users name: found here and in other processes; errors are one line."""

from functools import partial

import pytest

from dschat.config import UserError
from dschat.user_code.calls import Fault, called, load, portable, rebuilt, shortened

FILES = {
    "scores.py": "from beside import BONUS\n\ndef score(): return BONUS\n\nclass _Hidden: pass\n",
    "beside.py": "BONUS = 2",
    "fails.py": "import os\n\nos.environ['NO_SUCH_VARIABLE']\n",
    "leaves.py": "raise SystemExit(1)",
    "lacks.py": "import no_such_package",
    "package/__init__.py": "",
    "package/mod.py": "def f(): return 5",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory: files of users, good and bad."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_files_and_modules(folder):
    score = load("scores.py:score", "--flag")
    assert score() == 2  # it imports the file beside it
    assert score is load(f"{folder}/scores.py:score", "--flag")  # a file is imported once
    assert load("package.mod:f", "--flag")() == 5


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("scores.py", "name it as file.py:NAME or pkg.mod:NAME"),
        ("scores.py:Hidden", "not found: scores.py has no Hidden$"),
        ("scores.py:", "not found: scores.py has no name after the colon"),
        ("fails.py:f", "cannot be imported: it raised KeyError: 'NO_SUCH_.* in line 3"),
        ("leaves.py:f", r"cannot be imported: it called sys.exit\(1\)"),
        ("lacks.py:f", "cannot be imported: .*No module named 'no_such_package'"),
        ("no.such.mod:f", "not found: no module no; install it, or name a file"),
        ("package.nothing:f", "not found: no module package.nothing"),
    ],
)
def test_what_cannot_be_found_is_one_line(folder, spec, words):
    with pytest.raises(UserError, match=f"^--flag {words}") as caught:
        load(spec, "--flag")
    assert len(str(caught.value).splitlines()) == 1


def test_another_process_finds_the_same(folder):
    for target, spec in ((load, ""), (partial(int, base=2), ""), (None, "scores.py:score")):
        found = rebuilt(portable(target, spec, "--flag", "--pool thread"))
        assert found == (load(spec, "--flag") if spec else target) or found("11") == 3


def test_what_another_process_cannot_find_is_refused():
    for target, why in (
        (lambda: 3, ".*"),
        (type("A", (), {"__module__": "__main__"}), "it is def"),
    ):
        words = (
            rf"--flag cannot run in another process \({why}.* file.py:name, or pass --pool thread"
        )
        with pytest.raises(UserError, match=words):
            portable(target, "", "--flag", "--pool thread")


def test_calls():
    async def later(value):
        return value

    def fails(error):
        raise error

    assert (called(int, "3"), called(later, value=4)) == (3, 4)
    for error, problem in [
        (ValueError("no\nluck"), "raised ValueError: no luck"),
        (SystemExit(3), "called sys.exit(3)"),
        (KeyboardInterrupt(), "raised KeyboardInterrupt"),
        (Fault("was so"), "was so"),
    ]:
        with pytest.raises(Fault) as caught:
            called(fails, error)
        assert str(caught.value) == caught.value.problem == problem


def test_long_text_loses_its_middle():
    assert shortened("a" * 20, 20) == "a" * 20
    short = shortened("a" * 50 + "b" * 50, 20)
    assert len(short) == 20
    assert short[0] + short[-1] == "ab"
