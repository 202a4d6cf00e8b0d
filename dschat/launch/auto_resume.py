"""Decides whether train.py resumes an interrupted step, starts it over, or asks the user.

A step with a checkpoint resumes if its settings are those of the checkpoint. Changed settings need
a yes: ``--resume latest``, ``--restart`` or an answer on the terminal. The step itself resumes.
"""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Optional

from dschat.checkpoint.compatibility import (
    Change,
    changes,
    check_resume,
    describe,
    reads_model,
)
from dschat.checkpoint.manifest import FOLDER, newest, step_folders
from dschat.config import UserError
from dschat.launch.recipe import TrainingStep

Ask = Callable[[str], bool]  # question -> whether the answer was yes


def resolve_resume(
    step: TrainingStep,
    values: Mapping[str, Any],
    made_here: Collection[str],
    num_processes: int,
    restart: bool,
    ask: Optional[Ask],
) -> tuple[dict[str, Any], str]:
    """The field that makes a step with ``values`` resume or start over, and a line for the user;
    both empty without a checkpoint.

    Args:
        made_here: output folders of earlier steps of this run.
        ask: None if there is no terminal.

    Raises:
        UserError: the settings have changed and the user has not decided, or the checkpoint cannot
            be resumed with them.
    """
    folder, given = values["output_dir"], values.get("resume")
    if restart and given:
        raise UserError("--restart starts over and --resume resumes; leave one out")
    checkpoints = Path(folder) / FOLDER
    if not step_folders(checkpoints):
        return {}, ""
    if restart or values.get("overwrite_output_dir"):
        note = f"step {step.number} starts over: {checkpoints} is deleted"
        return {"overwrite_output_dir": True}, note
    if given not in (None, "latest"):
        return {}, f"step {step.number} resumes from {given}"
    resumes = {"resume": "latest"}
    checkpoint = newest(folder)
    if checkpoint is None:  # the step reports what is wrong with each
        return resumes, f"step {step.number}: {checkpoints} has no complete checkpoint"
    config = step.config_class(**values)
    check_resume(checkpoint, config, num_processes)
    models = {k: v for k, v in values.items() if reads_model(k) and v in made_here}
    changed = [change for change in changes(checkpoint, config) if change[0] not in models]
    changed += [(key, name, f"{name}, trained again") for key, name in models.items()]
    if changed and given is None:
        _confirm(step, folder, changed, ask)
    note = f"step {step.number} resumes from {checkpoint.folder}"
    note += f", with changed settings ({describe(changed)})" if changed else ""
    if checkpoint.world_size != num_processes:
        plural = "es" if num_processes > 1 else ""
        note += f", on {num_processes} process{plural}, not {checkpoint.world_size}"
    return resumes, note


def _confirm(step: TrainingStep, folder: str, changed: list[Change], ask: Optional[Ask]) -> None:
    """Raise ``UserError`` unless the user agrees to resume with changed settings."""
    restart = f"--restart starts step {step.number} over, or choose another --output_dir"
    if ask is None:
        raise UserError(
            f"{folder} has an unfinished run with other settings ({describe(changed)}); "
            f"--resume latest resumes with the new ones, {restart}"
        )
    lines = "".join(f"\n  {describe([change])}" for change in changed)
    if not ask(f"step {step.number} was interrupted and has changed settings:{lines}\nResume?"):
        raise UserError(f"{folder} has an unfinished run with other settings; {restart}")
