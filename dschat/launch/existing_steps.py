"""Decides what becomes of steps that are on disk: a finished one is reused or refused, an
interrupted one resumes, starts over, or is refused.

A step's training_config.yaml has its settings. Its COMPLETE file has their context: the working
directory, the number of processes, the precision of `dtype` auto, and fingerprints of data and
models. Older versions wrote an empty COMPLETE; such steps are compared by their settings alone.
"""

import json
import os
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Optional

from dschat.checkpoint.compatibility import (
    CHECKED,
    Change,
    RunRecord,
    changed_sizes,
    changes,
    check_resume,
    describe,
    differences,
    reads_model,
)
from dschat.checkpoint.manifest import FOLDER, newest, step_folders
from dschat.config import CommonConfig, UserError, parser
from dschat.config.renamed import translated
from dschat.launch.recipe import TrainConfig
from dschat.launch.step_runs import StepRun
from dschat.observability.metrics_log import SETTINGS
from dschat.runtime.output_dir import COMPLETE

# -- finished steps --------------------------------------------------------------------------------


def check_finished(
    run: StepRun, compared: Optional[Collection[str]], num_processes: int, reuse: bool
) -> list[str]:
    """Refuse a finished step that was trained with other settings than ``run``'s, or ``reuse`` it.

    ``compared``: names of the fields to compare; None: all. Returns a line for the user if a step
    with other settings is reused.

    Raises:
        UserError: the settings differ, and not ``reuse``.
    """
    config = run.step.config_class(**run.fields)
    changed = describe(finished_differences(config, compared, num_processes))
    if not changed:
        return []
    if reuse:
        return [f"step {run.number} is reused from {run.folder} with other settings ({changed})"]
    again = f"--step{run.number}.overwrite_output_dir"
    if compared is not None:
        again += f", with {run.number} in --step,"
    raise UserError(
        f"{run.folder} is finished, with other settings ({changed}); --reuse uses it as it is, "
        f"{again} trains it again; or choose another --output_dir"
    )


def finished_differences(
    config: CommonConfig, compared: Optional[Collection[str]], num_processes: int
) -> list[Change]:
    """What differs between the finished step in ``config.output_dir`` and one with ``config``; the
    size of a step over all processes too.
    """
    then, now = _recorded(config, num_processes), RunRecord.of(config, num_processes)
    if then is None:
        return []
    sizes = []
    if compared is None or CHECKED & set(compared):
        sizes = changed_sizes(type(config), then, now)
    return sizes + differences(type(config), then, now, compared)


def _recorded(config: CommonConfig, num_processes: int) -> Optional[RunRecord]:
    """The run that finished in ``config.output_dir``; None without a record. What the record lacks
    is taken from now, and settings of newer versions have their defaults.
    """
    assert config.output_dir is not None
    file = os.path.join(config.output_dir, SETTINGS)
    if not os.path.isfile(file):
        return None
    try:
        with open(os.path.join(config.output_dir, COMPLETE), encoding="utf-8") as mark:
            record = json.loads(mark.read())
    except ValueError:
        record = {}
    record = record if isinstance(record, dict) else {}
    content = translated(json.loads(json.dumps(parser.read_yaml(file), default=str)))
    defaults = json.loads(json.dumps(asdict(type(config)(output_dir=config.output_dir))))
    settings = {name: content.get(name, default) for name, default in defaults.items()}
    return RunRecord(
        settings,
        record.get("contents", {}),
        record.get("num_processes", num_processes),
        settings["output_dir"],
        record.get("working_directory", os.getcwd()),
        record.get("auto_dtype", ""),
    )


# -- interrupted steps -----------------------------------------------------------------------------


def resume(
    runs: Sequence[StepRun], config: TrainConfig, num_processes: int
) -> tuple[list[StepRun], list[str]]:
    """``runs``, of which those with a checkpoint resume or start over; and lines for the user.

    A step resumes if its settings are those of the checkpoint; with changed ones the user decides:
    ``--resume latest`` or ``--restart``. The step itself resumes.

    Raises:
        UserError: the settings have changed and the user has not decided, or the checkpoint cannot
            be resumed with them.
    """
    paths = [run for run in runs if run.fields.get("resume") not in (None, "latest")]
    if len(paths) > 1:
        raise UserError(
            f"--resume {paths[0].fields['resume']} is a checkpoint of one step; name the step: "
            f"--step{paths[-1].number}.resume"
        )
    made: list[StepRun] = []
    notes = []
    for run in runs:
        made_here = {earlier.folder for earlier in made}
        changed, note = _resumed(run, made_here, config, num_processes)
        made.append(changed)
        notes += [note] if note else []
    return made, notes


def _resumed(
    run: StepRun, made_here: Collection[str], train: TrainConfig, num_processes: int
) -> tuple[StepRun, str]:
    """``run`` as it resumes or starts over, and a line for the user; unchanged, and none, without a
    checkpoint. ``made_here``: output folders of earlier steps of this run.
    """
    values, given = run.fields, run.fields.get("resume")
    if train.restart and given:
        raise UserError("--restart starts over and --resume resumes; leave one out")
    checkpoints = Path(run.folder) / FOLDER
    if not step_folders(checkpoints):
        return run, ""
    if train.restart or values.get("overwrite_output_dir"):
        again = replace(run, fields={**values, "overwrite_output_dir": True})
        return again, f"step {run.number} starts over: {checkpoints} is deleted"
    if given not in (None, "latest"):
        return run, f"step {run.number} resumes from {given}"
    resumed = replace(run, fields={**values, "resume": "latest"})
    checkpoint = newest(run.folder)
    if checkpoint is None:  # the step reports what is wrong with each
        return resumed, f"step {run.number}: {checkpoints} has no complete checkpoint"
    config = run.step.config_class(**values)
    check_resume(checkpoint, config, num_processes)
    models = {k: v for k, v in values.items() if reads_model(k) and v in made_here}
    changed = [change for change in changes(checkpoint, config) if change[0] not in models]
    changed += [(key, name, f"{name}, trained again") for key, name in models.items()]
    if changed and given is None and not train.dry_run:
        raise UserError(
            f"{run.folder} has an unfinished run with other settings ({describe(changed)}); "
            "--resume latest resumes with the new ones, --restart starts step "
            f"{run.number} over, or choose another --output_dir"
        )
    note = f"step {run.number} resumes from {checkpoint.folder}"
    note += f", with changed settings ({describe(changed)})" if changed else ""
    if checkpoint.world_size != num_processes:
        plural = "es" if num_processes > 1 else ""
        note += f", on {num_processes} process{plural}, not {checkpoint.world_size}"
    return resumed, note
