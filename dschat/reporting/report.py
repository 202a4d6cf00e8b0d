"""Writes a report: OUT/report.html."""

import importlib.util
import time

from dschat.config import UserError
from dschat.config.report import PAGE, ReportConfig
from dschat.reporting.figures import sections_of
from dschat.reporting.page import render
from dschat.reporting.run_files import read_runs
from dschat.startup.files import replace_file


def write_report(config: ReportConfig) -> str:
    """Write the report of ``config.runs`` into the first; returns a line that says where.

    Raises:
        UserError: a folder without metrics, a line that cannot be read, a missing library, or a
            folder that cannot be written.
    """
    began = time.time()
    runs = read_runs(config.runs)
    missing = [name for name in ("plotly", "jinja2") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"a report needs {' and '.join(missing)}; install with pip install 'dschat[report]'"
        )
    page = runs[0].folder / PAGE
    try:
        # As old as what it shows: train.py asks whether there is a current one.
        replace_file(page, render(runs, sections_of(runs, config.max_points)), began)
    except OSError as error:
        raise UserError(f"{error.filename or page} cannot be written: {error.strerror}") from None
    return f"report: {page}"
