"""Runs that are saved and resumed, by this process and by two others."""

import sys
from pathlib import Path

import pytest

# `small_run` and `fakes` are plain modules: the two processes import them too.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def disk(monkeypatch):
    """The `fakes.Disk` that this process saves to; it is not full yet."""
    from fakes import Disk

    return Disk(monkeypatch)


@pytest.fixture(scope="session")
def here(tmp_path_factory):
    """``here(spec)``: the folder of all runs, and `small_run.saved` in this process; run once."""
    from small_run import saved

    folder, done = tmp_path_factory.mktemp("runs"), {}

    def run(spec):
        if spec not in done:
            done[spec] = saved(spec, folder)
        return folder, done[spec]

    return run


@pytest.fixture(scope="session")
def two(here, request):
    """``two(spec)``: for each of `small_run.JOBS` what two processes make of it, by its name. They
    are started once for all specs that the session's tests ask for.
    """
    from small_run import JOBS, launch

    asked = [
        item.callspec.params["spec"]
        for item in request.session.items
        if "two" in getattr(item, "fixturenames", ()) and "spec" in item.callspec.params
    ]
    specs = list(dict.fromkeys(asked))
    for spec in specs:
        folder, _ = here(spec)
    jobs = [(name, spec, args) for spec in specs for name, args in JOBS.values()]
    results = iter(launch(folder, jobs))
    by_spec = {spec: {job: next(results) for job in JOBS} for spec in specs}
    return by_spec.__getitem__
