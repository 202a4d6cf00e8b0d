"""Fixtures: models, undisturbed runs, small disks."""

import subprocess
from pathlib import Path

import pytest
from runs import Case, finish, make_models, mount


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def whole(models, tmp_path_factory):
    """Case -> the folder of a run to which nothing happens."""
    folder, made = tmp_path_factory.mktemp("whole"), {}

    def run(case: Case) -> Path:
        if case not in made:
            out = folder / str(len(made))
            log = out.with_suffix(".log")
            assert finish(case.command(models, out), log) == 0, log.read_text()[-3000:]
            made[case] = out
        return made[case]

    return run


@pytest.fixture
def small_disk(tmp_path):
    """``small_disk(size)``: the folder of a disk of so many bytes, to be called once."""
    disk = tmp_path / "disk"
    disk.mkdir()

    def make(size: int) -> Path:
        if not mount(disk, size):
            pytest.skip("may not mount")
        return disk

    yield make
    subprocess.run(["umount", "-l", str(disk)])
