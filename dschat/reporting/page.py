"""Renders the HTML page of a report: one file that opens from disk, without a network.

What a model wrote is untrusted: Jinja escapes all text, and the samples are JSON that the page's
script shows as text.
"""

import importlib.util
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from dschat import __version__
from dschat.config import UserError
from dschat.reporting.charts import file_name
from dschat.reporting.figures import Section, phase_seconds, sections_of, spread
from dschat.reporting.run_files import PAGE, STEPS, Run, read_runs
from dschat.startup.files import replace_file

_TEMPLATES = Path(__file__).with_name("templates")
_MAX_ITERATIONS = 24  # with samples, per run
_TIMES = (
    "iterations of step 3",
    "seconds per iteration (median)",
    "share of generate, score, train",
)
_BETTER = ("eval/score", "eval/rlhf_reward", "eval/pass@1", "eval/gold", "eval/accuracy")
_COST = "What did it cost?"
# Question -> the rows that answer it: title, step, metric.
_QUESTIONS = {
    "Did it learn, and when should it have stopped?": (
        ("held-out loss after step 1, nats per token", "step1_sft", "eval/loss"),
        ("reward model: held-out pairs ranked right", "step2_reward", "eval/accuracy"),
        ("policy: held-out pairs ranked right", "step3_rlhf", "eval/rewards/accuracies"),
        ("held-out score", "step3_rlhf", "eval/score"),
        ("held-out score less the KL penalty", "step3_rlhf", "eval/rlhf_reward"),
        ("held-out pass@1", "step3_rlhf", "eval/pass@1"),
        ("held-out gold score", "step3_rlhf", "eval/gold"),
        ("score in training", "step3_rlhf", "objective/scores"),
        ("KL to the reference model, nats per answer", "step3_rlhf", "eval/kl"),
    ),
    _COST: (("peak memory, GiB", "step3_rlhf", "memory/peak_gib"),),
}
Table = dict[str, Any]  # head, rows; of some: title, changed


def render(runs: Sequence[Run], sections: Sequence[Section]) -> str:
    """The page."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    figures = {
        figure.name: {"data": figure.traces, "layout": figure.layout}
        for section in sections
        for figure in section.figures
    }
    return environment.get_template("report.html").render(
        title=", ".join(run.name for run in runs),
        runs=runs,
        sections=sections,
        figures=figures,
        numbers=_numbers(runs),
        samples=_samples(runs),
        settings=_settings(runs),
        versions=_versions(runs),
        written=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        version=__version__,
        style=Markup((_TEMPLATES / "report.css").read_text("utf-8")),
        script=Markup((_TEMPLATES / "report.js").read_text("utf-8")),
        plotly=Markup(get_plotlyjs()),
    )


def _numbers(runs: Sequence[Run]) -> list[Table]:
    """A table for each question of a reader; rows without a value are left out."""
    tables = []
    for question, wanted in _QUESTIONS.items():
        rows = [[title, *(_values(run, *where) for run in runs)] for title, *where in wanted]
        if question == _COST:
            times = zip(*map(_times, runs), strict=True)
            rows += [[title, *values] for title, values in zip(_TIMES, times, strict=True)]
        rows = [row for row in rows if any(row[1:])]
        tables.append({"title": question, "head": ["", *(run.name for run in runs)], "rows": rows})
    return [table for table in tables if table["rows"]]


def _values(run: Run, step: str, metric: str) -> str:
    """The first and last value of a metric, and the best one with its iteration."""
    series = run.steps[step].series(metric) if step in run.steps else []
    shown = [f"{round(value, 6) + 0:.4g}" for _, value in series]
    if len(series) < 2:
        return "".join(shown)
    when, best = max(series, key=lambda pair: pair[1])
    note = "best" if best == series[-1][1] else f"best {best:.4g} at {when}"
    return f"{shown[0]} → {shown[-1]}" + (f" ({note})" if metric in _BETTER else "")


def _times(run: Run) -> tuple[str, str, str]:
    """The values of `_TIMES`."""
    step = run.steps.get("step3_rlhf")
    table = phase_seconds(step) if step else np.empty((0, 4))
    if not len(table):
        return "", "", ""
    seconds = table[:, 1:]
    shares = seconds.sum(axis=0) / seconds.sum() if seconds.sum() else ()
    median = f"{np.median(seconds.sum(axis=1)):.3g}"
    return str(int(table[-1, 0])), median, ", ".join(f"{share:.0%}" for share in shares)


def _samples(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Answers of evaluations, always to the same prompts, then of rollouts: what the page can show
    side by side.
    """
    shown = []
    for run in (run for run in runs if "step3_rlhf" in run.steps):
        step = run.steps["step3_rlhf"]
        for kind, rows in (("held out", step.held_out), ("training", step.samples)):
            for row in (rows[i] for i in spread(len(rows), _MAX_ITERATIONS)):
                label = f"{run.name}, " * (len(runs) > 1) + f"{kind}, iteration {row['step']}"
                names = {"label": label, "run": run.name, "kind": kind}
                shown.append(names | {"answers": row["samples"]})
    return shown


def _settings(runs: Sequence[Run]) -> list[Table]:
    """A table per step, with the settings that differ between the runs first."""
    tables = []
    for number, name in enumerate(STEPS, 1):
        having = {run.name: run.steps[name].settings for run in runs if name in run.steps}
        table = _side_by_side("setting", having)
        table["changed"] -= {"output_dir"}
        table["rows"].sort(key=lambda row: row[0] not in table["changed"])
        tables.append(table | {"title": f"Step {number} ({name})"})
    return [table for table in tables if table["rows"]]


def _versions(runs: Sequence[Run]) -> Table:
    """Versions of the last start of each run that recorded them."""
    last: dict[str, dict[str, Any]] = {}
    for run in runs:
        for row in chain(*(step.starts for step in run.steps.values())):
            if isinstance(row.get("versions"), dict):
                last[run.name] = row["versions"]
    return _side_by_side("", last)


def _side_by_side(title: str, columns: Mapping[str, Mapping[str, Any]]) -> Table:
    """Values by name, a column for each run that has any; a dash where an older version had no such
    value. ``changed``: the names whose values differ.
    """
    columns = {run: values for run, values in columns.items() if values}
    rows, changed = [], set()
    for name in dict.fromkeys(chain(*columns.values())):
        if len({str(values.get(name, "null")) for values in columns.values()}) > 1:
            changed.add(name)
        rows.append([name, *(_shown(values.get(name, "-")) for values in columns.values())])
    return {"head": [title, *columns], "rows": rows, "changed": changed}


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


# -- report ----------------------------------------------------------------------------------------


def write_report(folders: Sequence[str]) -> str:
    """Write the report of the runs in ``folders`` into the first, of several under a name of its
    own; returns a line that says where.

    Raises:
        UserError: a folder without metrics, a line that cannot be read, a missing library, or a
            folder that cannot be written.
    """
    began = time.time()
    runs = read_runs(folders)
    missing = [name for name in ("plotly", "jinja2") if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"a report needs {' and '.join(missing)}; install with pip install 'dschat[report]'"
        )
    page = runs[0].folder / PAGE
    if len(runs) > 1:  # the first run keeps its own
        others = file_name(" ".join(run.name for run in runs[1:]))[:100]
        page = page.with_stem(f"{page.stem}-with-{others}")
    try:
        # As old as what it shows: train.py asks whether there is a current one.
        replace_file(page, render(runs, sections_of(runs)), began)
    except OSError as error:
        raise UserError(f"{error.filename or page} cannot be written: {error.strerror}") from None
    return f"report: {page}"
