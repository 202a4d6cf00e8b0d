"""make venv, with programs in place of Python and pip."""

import shutil
import subprocess

from documentation import ROOT

# Makes an environment, and installs into it, or fails half-way where there is a file `fails`.
PYTHON = """#!/bin/sh
case "$*" in
    "-m venv --clear .venv") rm -rf .venv; mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
    "-m venv .venv") mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
    *"-m pip install"*) echo "$4" >> .venv/installed; [ ! -e fails ] ;;
esac
"""


def test_an_interrupted_environment_is_made_anew(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    for name in ("requirements.lock", "pyproject.toml"):
        (tmp_path / name).touch()
    installed, stamp = tmp_path / ".venv" / "installed", tmp_path / ".venv" / ".stamp"

    def make_venv() -> tuple[bool, int]:
        """Whether it worked, and the number of installations in the environment."""
        command = ["make", "venv", f"PYTHON={tmp_path / 'python'}"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        return done.returncode == 0, len(installed.read_text().splitlines())

    (tmp_path / "fails").touch()
    assert make_venv() == (False, 1)
    assert make_venv() == (False, 1)
    (tmp_path / "fails").unlink()
    assert make_venv() == (True, 2)
    assert make_venv() == (True, 2)  # nothing to do
    # Newer versions: installed into the environment, unless that was interrupted too.
    (tmp_path / "requirements.lock").write_text("torch")
    subprocess.run(["touch", "-d", "2 hours ago", stamp], check=True)
    (tmp_path / "fails").touch()
    assert make_venv() == (False, 3)
    (tmp_path / "fails").unlink()
    assert make_venv() == (True, 2)
