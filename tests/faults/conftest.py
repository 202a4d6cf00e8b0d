"""Fixtures: models, undisturbed runs."""

from pathlib import Path

import pytest
from runs import Case, finish, make_models


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
