"""The ``dschat`` command: in the repository, and from a wheel in a folder that is not the
repository.
"""

import shlex
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
from python_process import ROOT, environment, python

from dschat.__main__ import COMMANDS

SCRIPTS = [
    *(ROOT / "train.py", ROOT / "chat.py"),
    *ROOT.glob("step*/main.py"),
    *(path for path in ROOT.glob("training/**/*") if path.is_file()),
]


def dschat(*argv: str, package: Path = ROOT, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    """``python -m dschat`` with the package that is in ``package``."""
    return python("-m", "dschat", *argv, cwd=cwd, env=environment(PYTHONPATH=str(package)))


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A copy of the repository: building leaves files in the tree."""
    folder = tmp_path_factory.mktemp("wheel")
    others = ("tests", "output", "build", "dist", "*.egg-info", "__pycache__", ".*")
    return shutil.copytree(ROOT, folder / "dschat", ignore=shutil.ignore_patterns(*others))


@pytest.fixture(scope="module")
def wheel(clone):
    """The folder of an unpacked wheel."""
    return unpacked(clone, "build_wheel")


def unpacked(clone: Path, hook: str) -> Path:
    """What a hook that pip calls builds, unpacked beside the clone."""
    folder = clone.parent / hook
    folder.mkdir()
    build = f"from setuptools import build_meta; build_meta.{hook}({str(folder)!r})"
    done = python("-c", build, cwd=clone)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_help_lists_every_command():
    for argv in ([], ["-h"], ["--help"]):
        done = dschat(*argv)
        assert (done.returncode, done.stderr) == (0, "")
        listed = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")]
        assert listed == [
            *("train", "sft", "reward", "rlhf", "chat", "serve", "generate", "eval"),
            *("data", "replay", "report", "env"),
        ]


def test_an_unknown_command_is_one_line():
    done = dschat("tune", "--step", "3")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: unknown command tune; choose from train, sft, ")
    assert len(done.stderr.splitlines()) == 1


def test_a_command_gets_its_flags():
    done = dschat("sft", "--sedd", "1")
    assert (done.returncode, done.stderr) == (
        2,
        "error: unknown flag --sedd; did you mean --seed?\n",
    )


@pytest.mark.slow
def test_the_rank_that_deepspeed_puts_before_the_command():
    done = dschat("--local_rank=0", "sft", "--seed", "one")
    assert (done.returncode, done.stderr) == (2, "error: --seed 'one' is not a whole number\n")


def test_the_wheel_has_every_file(wheel):
    package = {p for p in (ROOT / "dschat").rglob("*") if p.is_file() and p.suffix != ".pyc"}
    names = {p.relative_to(ROOT) for p in package}
    names |= {"dschat" / Path("scripts", p.relative_to(ROOT)) for p in SCRIPTS}
    assert {p.relative_to(wheel) for p in (wheel / "dschat").rglob("*") if p.is_file()} == names
    for path in SCRIPTS:
        assert (wheel / "dschat/scripts" / path.relative_to(ROOT)).read_bytes() == path.read_bytes()


@pytest.mark.slow
def test_an_editable_install_is_found_in_the_folder_of_the_clone(clone):
    """There a folder called dschat, without __init__.py, comes before the package."""
    site = unpacked(clone, "build_editable")
    code = f"import site; site.addsitedir({str(site)!r}); import dschat; print(dschat.__file__)"
    done = python("-S", "-c", code, cwd=clone.parent, env=environment(PYTHONPATH=""))
    assert done.stdout.strip() == str(clone / "dschat" / "__init__.py"), done.stderr


@pytest.mark.slow
def test_the_wheel_plans_the_demo_in_another_folder(wheel, tmp_path):
    done = dschat("train", "--dry_run", package=wheel, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    scripts = [tmp_path / shlex.split(line)[1] for line in done.stdout.splitlines()]
    folder = wheel / "dschat" / "scripts"
    steps = ("step1_sft", "step2_reward", "step3_rlhf")
    assert [path.resolve() for path in scripts] == [folder / step / "main.py" for step in steps]


@pytest.mark.parametrize(
    "command", [c if c == "rlhf" else pytest.param(c, marks=pytest.mark.slow) for c in COMMANDS]
)
def test_the_wheel_runs_each_command(command, wheel, tmp_path):
    done = dschat(command, "--help", package=wheel, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: dschat {command} ")
