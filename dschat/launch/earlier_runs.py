"""Decides what becomes of the steps of an earlier run: a finished one is reused or refused, an
interrupted one resumes, starts over, or is refused.

A step's training_config.yaml has its settings. Its COMPLETE file has their context: the working
directory, the number of processes, the precision of `dtype` auto, and fingerprints of data and
models; and a checksum of both files.
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
from dschat.checkpoint.manifest import FOLDER, Damaged, newest, step_folders
from dschat.config import CommonConfig, UserError, parser
from dschat.config.renamed import translated
from dschat.launch.recipe import StepRun, TrainConfig
from dschat.observability.metrics_log import SETTINGS
from dschat.runtime.output_dir import COMPLETE, sealed
from dschat.startup.files import no_link


def reuse(runs: Sequence[StepRun], train: TrainConfig, num_processes: int) -> list[StepRun]:
    """``runs``, of which the reused ones were trained with the settings that they have here.

    Raises:
        UserError: a finished step has other settings, and not ``train.reuse``.
    """
    return [
        replace(run, note=check_finished(run, num_processes, train.reuse) if run.is_reused else "")
        for run in runs
    ]


def check_finished(run: StepRun, num_processes: int, reuse: bool) -> str:
    """Refuse a finished step that was trained with other settings than ``run``'s, or ``reuse`` it.
    Returns a line for the user if a step with other settings is reused.
    """
    fields = run.fields if run.compared is None else {**run.compared, "output_dir": run.folder}
    config, kind = run.step.config_class(**fields), "other"
    try:
        changed = describe(finished_differences(config, run.compared, num_processes))
    except Damaged as error:  # unknown is not equal
        kind, changed = "unknown", str(error)
    if not changed:
        return ""
    if reuse:
        return f"step {run.number} is reused from {run.folder} with {kind} settings ({changed})"
    listed = "" if run.compared is None else f", with {run.number} in --step,"
    raise UserError(
        f"{run.folder} is finished, with {kind} settings ({changed}); --reuse uses it as it is, "
        f"--step{run.number}.overwrite_output_dir{listed} trains it again; or choose another "
        "--output_dir"
    )


def finished_differences(
    config: CommonConfig, compared: Optional[Collection[str]], num_processes: int
) -> list[Change]:
    """What differs between the finished step in ``config.output_dir`` and one with ``config``; the
    size of a step over all processes too.

    Raises:
        Damaged: what it was trained with is not known.
    """
    if compared is not None and not compared:
        return []
    then, now = _recorded(config, num_processes), RunRecord.of(config, num_processes)
    sizes = []
    if compared is None or CHECKED & set(compared):
        sizes = changed_sizes(type(config), then, now)
    return sizes + differences(type(config), then, now, compared)


def _recorded(config: CommonConfig, num_processes: int) -> RunRecord:
    """The run that finished in ``config.output_dir``. Settings of newer versions have their
    defaults. Raises ``Damaged`` where its files do not say, or are not what was written.
    """
    folder = Path(str(config.output_dir))
    try:
        content = parser.read_yaml(folder / SETTINGS)
    except UserError:
        raise Damaged(f"{SETTINGS} cannot be read") from None
    try:
        with open(folder / COMPLETE, encoding="utf-8", opener=no_link) as mark:
            text = mark.readline()
            is_whole = mark.read() in ("", sealed(folder, text).removeprefix(text))
        record = json.loads(text)
        contents = record["contents"]
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        raise Damaged(f"{COMPLETE} cannot be read") from None
    if not is_whole:
        raise Damaged(f"{SETTINGS} or {COMPLETE} was changed since")
    content = translated(json.loads(json.dumps(content, default=str)))
    defaults = json.loads(json.dumps(asdict(type(config)(output_dir=config.output_dir))))
    settings = {name: content.get(name, default) for name, default in defaults.items()}
    return RunRecord(
        settings,
        contents,
        record.get("num_processes", num_processes),
        settings["output_dir"],
        record.get("working_directory", os.getcwd()),
        record.get("auto_dtype", ""),
    )


def resume(runs: Sequence[StepRun], train: TrainConfig, num_processes: int) -> list[StepRun]:
    """``runs``, of which those with a checkpoint resume or start over.

    A step resumes if its settings equal the checkpoint's; with changed ones the user decides:
    ``--resume latest`` or ``--restart``. The step itself resumes.

    Raises:
        UserError: the settings have changed and the user has not decided, or the checkpoint cannot
            be resumed with them.
    """
    paths = [run for run in runs if run.trains and run.fields.get("resume") not in (None, "latest")]
    if len(paths) > 1:
        raise UserError(
            f"--resume {paths[0].fields['resume']} is a checkpoint of one step; name the step: "
            f"--step{paths[-1].number}.resume"
        )
    resumed: list[StepRun] = []
    for run in runs:
        made_here = {earlier.folder for earlier in resumed if earlier.trains}
        run = replace(run, note="")
        resumed.append(_resumed(run, made_here, train, num_processes) if run.trains else run)
    return resumed


def _resumed(
    run: StepRun, made_here: Collection[str], train: TrainConfig, num_processes: int
) -> StepRun:
    """``run`` as it resumes or starts over; unchanged without a checkpoint. ``made_here``: output
    folders of earlier steps of this run.
    """
    fields, given = run.fields, run.fields.get("resume")
    if train.restart and given:
        raise UserError("--restart starts over and --resume resumes; leave one out")
    checkpoints = Path(run.folder) / FOLDER
    if not step_folders(checkpoints):
        return run
    if train.restart or fields.get("overwrite_output_dir"):
        note = f"step {run.number} starts over: {checkpoints} is deleted"
        return replace(run, fields={**fields, "overwrite_output_dir": True}, note=note)
    if given not in (None, "latest"):
        return replace(run, note=f"step {run.number} resumes from {given}")
    checkpoint = newest(run.folder)
    if checkpoint is None:  # the step reports what is wrong with each
        note = f"step {run.number}: {checkpoints} has no complete checkpoint"
        return replace(run, fields={**fields, "resume": "latest"}, note=note)
    config = run.step.config_class(**fields)
    check_resume(checkpoint, config, num_processes)
    models = {k: v for k, v in fields.items() if reads_model(k) and v in made_here}
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
    return replace(run, fields={**fields, "resume": "latest"}, note=note)
