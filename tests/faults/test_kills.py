"""A step that is killed at any moment and resumed records the same as an undisturbed one."""

import pytest
from cases import QUICK, SLOW
from orphans import run_whole, survive_alone, train_py
from runs import finish, rows, survive


@pytest.mark.parametrize(
    "case", [*QUICK, *(pytest.param(c, marks=pytest.mark.slow) for c in SLOW)], ids=lambda c: c.name
)
def test_killed_and_resumed(case, models, tmp_path):
    whole = tmp_path / "whole"
    command, log = case.command(models, whole), tmp_path / "whole.log"
    assert finish(command, log) == 0, log.read_text()[-3000:]
    expected = rows(whole)
    steps = [row["step"] for row in expected if not any(name.startswith("eval") for name in row)]
    assert len(set(steps)) == len(steps) >= 6
    killed = survive(case, models, tmp_path / "killed", whole, kills=2, seed=case.name)
    assert killed.total() >= 1


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.dist)])
def test_train_py_alone_is_killed(ranks, models, tmp_path):
    """Its step ends with it, launchers too, and the same command, started at once, waits."""
    seconds = run_whole(train_py(models, tmp_path / "whole", ranks=ranks))
    command = train_py(models, tmp_path / "killed", ranks=ranks)
    assert survive_alone(command, tmp_path / "whole", seconds, kills=2, seed="2") >= 1
