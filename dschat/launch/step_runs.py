"""Decides which steps of a run are trained, from which models, and why.

A function of what was asked for and of what lies on disk; `run_plan` looks at the disk.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dschat.config import UserError
from dschat.launch.recipe import TrainingStep
from dschat.launch.steps import BASE, Values, inputs_of

Status = Literal["runs", "reused", "left out"]
Reason = Literal["asked for", "needed", "finished", "input", "base", "trained already"]

_NOTES: dict[Reason, str] = {
    "needed": "step {n} runs first: a later step needs its model, which is not in {out}",
    "finished": "step {n} is finished in {folder}: skipped (--overwrite_output_dir runs it again)",
    "input": "step {last} starts from {folder}, finished earlier",
    "trained already": "step {last} starts from {base}, which is trained already",
}
_BASE_FLAGS = {1: "--actor_model", 2: "--reward_model"}


@dataclass(frozen=True)
class Found:
    """Steps by number: those that are ``finished`` in the run's folder, and those whose base model
    is ``trained`` already: a finished policy, a reward model.
    """

    finished: frozenset[int] = frozenset()
    trained: frozenset[int] = frozenset()


@dataclass(frozen=True)
class StepRun:
    """A step that runs with ``fields``, whose finished output is reused, or that is left out
    because its base model is trained already.
    """

    step: TrainingStep
    fields: Mapping[str, Any]
    status: Status
    reason: Reason

    def note(self, last: int, out: Path) -> str:
        """A line for the user; empty where they get what they asked for."""
        folder, base = folder_of(out, self.step), self.fields.get(BASE)
        text = _NOTES.get(self.reason, "")
        return text.format(n=self.step.number, last=last, folder=folder, base=base, out=out)


def step_runs(
    steps: Mapping[int, TrainingStep],
    values: Values,
    asked: Collection[int],
    found: Found,
    out: Path,
) -> list[StepRun]:
    """The steps of a run into ``out``, in order. ``asked``: numbers of ``--step``; none: all.

    The initial models of the last step come from the other steps, unless ``values`` name them.

    Raises:
        UserError: a step lacks its base model, or a finished step would get another one.
    """
    last, selected = max(steps), set(asked or steps)
    fields = {n: dict(values[n]) for n in steps}
    needed: set[int] = set()
    trained: set[int] = set()
    for n, keys in inputs_of(steps, values).items() if last in selected else ():
        base, folder = fields[n].get(BASE), folder_of(out, steps[n])
        if any(fields[last].get(key, folder) != folder for key in keys):
            continue  # its own fields name a model
        skips = bool(base) and n not in asked and n in found.trained
        (trained if skips else needed).add(n)
        fields[last][keys[0]] = base if skips else folder
    if not asked:  # steps whose model is trained already run only with --step
        selected -= set(steps) - {last} - needed
    done = {n for n in found.finished if not fields[n].get("overwrite_output_dir")}
    runs = selected - done
    before = needed - found.finished if last in runs else set()
    starts_from = fields[2].get(BASE) if 2 in runs | before else None
    bases = {1} if starts_from == folder_of(out, steps[1]) else set()  # a recipe's {step1}
    before |= bases - found.finished
    trains = {folder_of(out, steps[n]) for n in runs | before}
    made = []
    for n in sorted(selected | needed | bases | trained):
        status: Status = "runs" if n in runs | before else "reused"
        reason: Reason = "asked for"
        if status == "runs" and n not in selected:
            reason = "needed"
        elif status == "reused" and n in selected:
            reason = "finished"
        elif status == "reused" and n in trained - bases:
            status, reason = "left out", "trained already"
        elif status == "reused":
            reason = "input" if n in needed and last in runs else "base"
        made.append(StepRun(steps[n], fields[n], status, reason))
        if status == "reused" and trains & {v for v in fields[n].values() if isinstance(v, str)}:
            listed = "" if n in selected else f", with {n} in --step,"
            raise UserError(
                f"{folder_of(out, steps[n])} is finished, but its initial model would be trained "
                f"again; --step{n}.overwrite_output_dir{listed} trains it again too, or choose "
                "another --output_dir"
            )
    for run in made:
        n = run.step.number
        if run.status == "runs" and n in _BASE_FLAGS and not run.fields.get(BASE):
            raise UserError(
                f"{_BASE_FLAGS[n]} is missing: name the base model of step {n}, a folder or a hub "
                "model"
            )
    return made


def folder_of(out: Path, step: TrainingStep) -> str:
    """The output folder of ``step``."""
    return str(out / step.folder)
