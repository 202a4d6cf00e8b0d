"""Two processes, started once for all the cases that need them."""

import json
from dataclasses import asdict
from pathlib import Path

import forked
import pytest

WORKER = Path(__file__).with_name("worker.py")
TIMEOUT_S = 600


def launch(cases, models, out: Path):
    """Run ``cases`` on two processes; returns {case: [result of rank 0, of rank 1]}."""
    out.mkdir(parents=True, exist_ok=True)
    cases_file = out / "cases.json"
    cases_file.write_text(json.dumps([json.dumps(asdict(case)) for case in cases]))
    command = [str(WORKER), str(models), str(out), str(cases_file)]
    ranks = forked.run_ranks(command, out / "ranks", TIMEOUT_S * max(1, len(cases) / 12))
    assert not any(rank.code for rank in ranks), "\n".join(rank.stderr[-3000:] for rank in ranks)
    results = [json.loads((out / f"results_{rank}.json").read_text()) for rank in range(2)]
    return dict(zip(cases, zip(*results, strict=True), strict=True))


@pytest.fixture(scope="session")
def two_processes(models_folder, tmp_path_factory, request):
    """``two_processes(case)``: rank 0's result and the folder. One launch runs all cases that are
    parameters of tests.
    """
    from step_cases import Case

    wanted = [
        value
        for item in request.session.items
        if "two_processes" in item.fixturenames
        for value in item.callspec.params.values()
        if isinstance(value, Case)
    ]
    out = tmp_path_factory.mktemp("two_processes")
    results = launch(list(dict.fromkeys(wanted)), models_folder, out)
    return lambda case: (results[case][0], out / case.name)
