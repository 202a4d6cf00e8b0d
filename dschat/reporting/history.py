"""Tells what runs went through: starts, resumes, restarts, checkpoints, the end of each step."""

import json
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from dschat.checkpoint.manifest import FOLDER, step_folders
from dschat.reporting.run_files import STEPS, Run, Step, is_finite

_EVENTS = {
    "start": "started",
    "restart": "started over; the earlier rows were dropped",
    "resume": "resumed after step {step}",
}


def history_of(runs: Sequence[Run]) -> dict[str, Any]:
    """A table of events, in order of time within each step of each run."""
    rows = []
    for run in runs:
        for name in STEPS:
            if name in run.steps:
                rows += [[run.name, name, *event] for event in _events(run.steps[name])]
    return {"head": ["run", "step", "time", "event", "where"], "rows": rows}


def _events(step: Step) -> list[list[str]]:
    """[time, event, where] of each event."""
    events = []
    for row in step.starts or _recorded_at_the_end(step):
        text = _EVENTS.get(str(row.get("event")), "started").format(step=row["step"])
        events.append([_time(row.get("time")), text, _where(row)])
    last = step.rows[-1]["step"]
    if step.is_complete:
        ended = (step.folder / "COMPLETE").stat().st_mtime
        events.append([_time(ended), f"finished at step {last}", ""])
    else:
        changed = (step.folder / "metrics.jsonl").stat().st_mtime
        events.append([_time(changed), f"not finished; last row is of step {last}", ""])
    saved = sorted(step_folders(step.folder / FOLDER).values())
    if saved:
        events.append(["", f"checkpoints kept: after step {', '.join(map(str, saved))}", ""])
    return events


def _recorded_at_the_end(step: Step) -> list[dict[str, Any]]:
    """The start of a step of an older version, which its COMPLETE file names."""
    try:
        content = json.loads((step.folder / "COMPLETE").read_text("utf-8"))
        return [{"step": 0, "time": content["started"], "processes": content["num_processes"]}]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _time(seconds: Any) -> str:
    if not is_finite(seconds):
        return ""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def _where(row: dict[str, Any]) -> str:
    count = row.get("processes")
    parts = [f"{count} process{'es' if count != 1 else ''}" if count else ""]
    parts += [str(row.get("device") or ""), str(row.get("host") or "")]
    return ", ".join(filter(None, parts))
