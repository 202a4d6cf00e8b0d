"""Installed libraries of versions that pyproject.toml excludes: one line before anything loads."""

import os
import sys
from importlib import metadata

import pytest
from python_process import ROOT, environment, python

from dschat.config import UserError
from dschat.distributed import host_checks

REQUIRED = [
    "torch>=2.9",
    "PyYAML!=6.0.4,>=6.0",
    "a-lib<6,>=5.2",
    'extra>=1; extra == "some"',
    'tool>=1; extra == "dev"',
    "tqdm",
]


@pytest.mark.parametrize(
    ("name", "version", "is_right"),
    [
        ("a-lib", "5.2", True),
        ("a-lib", "5.24.1+cpu", True),
        ("a-lib", "5.1.9", False),
        ("a-lib", "6.0.0.dev1", False),
        ("a-lib", "10.0", False),
        ("PyYAML", "6.0.4", False),
        ("PyYAML", "6.0.5", True),
        ("torch", "2.10.0", True),
        ("extra", "0.9", False),
        ("tool", "0.9", True),
        ("tqdm", "0.1", True),
    ],
)
def test_versions_inside_and_outside_the_ranges(name, version, is_right, monkeypatch):
    def installed(asked):
        if asked != name:
            raise metadata.PackageNotFoundError(asked)
        return version

    monkeypatch.setattr(metadata, "requires", lambda _: REQUIRED)
    monkeypatch.setattr(metadata, "version", installed)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    if is_right:
        host_checks.check_versions()
    else:
        with pytest.raises(
            UserError, match=f"^{name} {version} does not work .*pip install '{name}"
        ):
            host_checks.check_versions()


@pytest.mark.parametrize(("flags", "code"), [(["--dry-run"], 2), (["--help"], 0)])
def test_a_command_with_such_a_library(flags, code, tmp_path):
    for name, version, more in (("dschat", "0", "Requires-Dist: pip<6,>=5\n"), ("pip", "6.1", "")):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{more}"
        (folder / "METADATA").write_text(text)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    env = environment(PYTHONPATH=path)
    done = python("-m", "dschat", "train", *flags, cwd=tmp_path, env=env)
    assert done.returncode == code, done.stderr
    line = "error: pip 6.1 does not work with dschat: pip install 'pip<6,>=5'\n"
    assert done.stderr == (line if code else "")
