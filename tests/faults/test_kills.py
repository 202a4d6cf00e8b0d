"""A step that is killed at any instant, and gone on with, records what one that is not records."""

import pytest
from cases import QUICK, SLOW
from runs import finish, make_models, rows, survive


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(
    "case", [*QUICK, *(pytest.param(c, marks=pytest.mark.slow) for c in SLOW)], ids=lambda c: c.name
)
def test_killed_and_gone_on_with(case, models, tmp_path):
    whole = tmp_path / "whole"
    command, log = case.command(models, whole), tmp_path / "whole.log"
    assert finish(command, log) == 0, log.read_text()[-3000:]
    expected = rows(whole)
    steps = [row["step"] for row in expected if not any(name.startswith("eval") for name in row)]
    assert len(set(steps)) == len(steps) >= 6
    killed = survive(case, models, tmp_path / "killed", whole, kills=2, seed=case.name)
    assert killed.total() >= 1
