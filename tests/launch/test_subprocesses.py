"""train.py's report: a line that says where, or why not; never a failure."""

import os
import time
from pathlib import Path

import pytest
from python_process import environment
from stub_steps import QUIET, train

from dschat.launch.supervisor import RunReport

ENVIRONMENT = environment()


def write_metrics(folder: Path, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text(text)


def test_a_report_that_cannot_be_written_is_one_line(tmp_path):
    write_metrics(tmp_path / "step1_sft", '{"step": 1, "loss": 2.0}\n{"step"\n')
    page = tmp_path / "report.html"
    page.mkdir()
    line = RunReport(tmp_path, ENVIRONMENT).write()
    assert line == f"no report: {page} cannot be written: Is a directory"
    page.rmdir()
    assert RunReport(tmp_path, ENVIRONMENT).write() == f"report: {page}"


def test_a_report_is_current_until_a_step_finishes_after_it(tmp_path):
    report, page, mark = RunReport(tmp_path, {}), tmp_path / "report.html", tmp_path / "mark"
    mark.touch()
    assert not report.is_current([mark])  # no page
    page.touch()
    assert report.is_current([mark])
    os.utime(page, (time.time() - 1,) * 2)
    assert not report.is_current([mark])
    assert report.is_current([])


@pytest.mark.slow
def test_no_report_and_no_reason_where_none_is_wanted(tree):
    done = train(*QUIET, "--no_report")
    assert (done.returncode, "no report" in done.stdout) == (0, False)


@pytest.mark.slow
def test_a_report_that_a_kill_prevented_is_written_later(tree):
    """Steps that are finished are skipped; their report is written if it is missing or older."""
    assert "no report: out: no metrics there" in train(*QUIET).stdout
    page = tree / "out/report.html"
    page.touch()
    assert "report" not in train(*QUIET).stdout
    page.unlink()
    assert "no report: out: no metrics there" in train(*QUIET).stdout
