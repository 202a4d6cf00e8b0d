"""Writes a report: OUT/report.html, and every figure as PNG and SVG into OUT/figures."""

import importlib.util
import os
import time
from pathlib import Path

from dschat.config import UserError
from dschat.config.report import FIGURES, PAGE, ReportConfig
from dschat.reporting.figures import sections_of
from dschat.reporting.files import write_figures
from dschat.reporting.page import render
from dschat.reporting.run_files import read_runs


def write_report(config: ReportConfig) -> str:
    """Write the report of ``config.runs`` into the first; returns a line that says where.

    Raises:
        UserError: a folder without metrics, a line that cannot be read, a missing library, or a
            folder that cannot be written.
    """
    began = time.time()
    runs = read_runs(config.runs)
    _check_installed(["plotly", "jinja2", *(["matplotlib"] if config.figures != "none" else [])])
    sections = sections_of(runs, config.max_points)
    out = runs[0].folder
    line = f"report: {out / PAGE}"
    try:
        if config.figures != "none":
            figures = [
                figure
                for section in sections
                for figure in section.figures
                if config.figures == "all" or not section.is_folded
            ]
            line += f", {write_figures(figures, out / FIGURES)} figures in {out / FIGURES}"
        # Last, and as old as what it shows: train.py asks whether there is a current one.
        _write(out / PAGE, render(runs, sections), began)
    except OSError as error:
        raise UserError(f"{error.filename or out} cannot be written: {error.strerror}") from None
    return line


def _check_installed(names: list[str]) -> None:
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"a report needs {' and '.join(missing)}; install with pip install 'dschat[report]'"
        )


def _write(path: Path, text: str, modified: float) -> None:
    """Write and rename: a browser that reloads never sees a partial page."""
    scratch = path.with_name(path.name + ".part")
    scratch.write_text(text, encoding="utf-8")
    os.utime(scratch, (modified, modified))
    os.replace(scratch, path)
