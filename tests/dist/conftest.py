"""Two processes, started once for all the cases that need them."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from filelock import FileLock

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).with_name("worker.py")
TIMEOUT_S = 200


def launch(cases, models, out: Path, world_size: int = 2):
    """Run ``cases`` on ``world_size`` processes; returns {case: [result of rank 0, of rank 1]}."""
    out.mkdir(parents=True, exist_ok=True)
    cases_file = out / "cases.json"
    cases_file.write_text(json.dumps([json.dumps(asdict(case)) for case in cases]))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world_size),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-W", "ignore", str(WORKER), str(models), str(out), str(cases_file)]
    workers = []
    for rank in range(world_size):
        environment = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with open(out / f"rank_{rank}.log", "w") as log:
            workers.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    try:
        codes = [worker.wait(timeout=TIMEOUT_S * max(1, len(cases) / 12)) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    logs = "\n".join((out / f"rank_{rank}.log").read_text()[-3000:] for rank in range(world_size))
    assert not any(codes), logs
    ranks = [json.loads((out / f"results_{rank}.json").read_text()) for rank in range(world_size)]
    return dict(zip(cases, zip(*ranks, strict=True), strict=True))


@pytest.fixture(scope="session")
def two_processes(models_folder, tmp_path_factory, request):
    """``two_processes(case)``: rank 0's result and the folder. One launch runs all cases.

    One for all of pytest-xdist's workers, too: the first that asks launches, the others wait.
    """
    wanted = [
        item.callspec.params["case"]
        for item in request.session.items
        if "two_processes" in item.fixturenames
    ]
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    out, answers = shared / "two_processes", shared / "two_processes.json"
    with FileLock(shared / "two_processes.lock"):
        if not answers.exists():
            results = launch(list(dict.fromkeys(wanted)), models_folder, out)
            answers.write_text(json.dumps({case.name: r[0] for case, r in results.items()}))
    by_name = json.loads(answers.read_text())
    return lambda case: (by_name[case.name], out / case.name)
