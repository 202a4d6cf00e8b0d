"""What train.py does with a step that was cut short: goes on, begins anew, or asks.

The step's given fields and its folder come in; the fields that say how to begin, and a line about
it, go out. It must not know how a step goes on.
"""

import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Optional

from dschat.checkpoint.compatibility import (
    Change,
    changes,
    check_step_size,
    check_weights,
    describe,
)
from dschat.checkpoint.manifest import FOLDER, MANIFEST, Found, newest, step_folders
from dschat.config import UserError
from dschat.launch.recipe import TrainingStep
from dschat.runtime.output_dir import COMPLETE

Ask = Callable[[str], bool]  # a question -> yes or no


def resolve_resume(
    step: TrainingStep,
    values: dict[str, Any],
    made_here: Collection[str],
    num_processes: int,
    restart: bool,
    ask: Optional[Ask],
) -> list[str]:
    """Complete the fields ``values`` of a step that will run, and say so.

    ``made_here``: folders that this run fills before. ``ask``: None where nobody can answer.

    Raises:
        UserError: the settings have changed since, and nobody said what to do, or they cannot be
            resumed with.
    """
    folder, given = values["output_dir"], values.get("resume")
    if restart and given:
        raise UserError("--restart begins anew and --resume goes on; leave one out")
    checkpoints = Path(folder) / FOLDER
    if not step_folders(checkpoints):
        return []
    if restart or values.get("overwrite_output_dir"):
        values["overwrite_output_dir"] = True
        return [f"step {step.number} begins anew: {checkpoints} is cleared"]
    if given not in (None, "latest"):
        return [f"step {step.number} goes on from {given}"]
    values["resume"] = "latest"
    found = newest(folder)
    if found is None:  # all are damaged; the step names what is wrong with each
        return [f"step {step.number}: no checkpoint in {checkpoints} is whole"]
    config = step.config_class(**values)
    check_step_size(found, config, num_processes)
    check_weights(found, config)
    changed = changes(found, config)
    changed += _trained_again(found, values, made_here)
    if changed and given is None:
        _settle(step, folder, changed, ask)
    note = f"step {step.number} goes on from {found.folder}"
    note += f", with other settings ({describe(changed)})" if changed else ""
    if found.world_size != num_processes:
        plural = "es" if num_processes > 1 else ""
        note += f", on {num_processes} process{plural}, not {found.world_size}"
    return [note]


def _settle(step: TrainingStep, folder: str, changed: list[Change], ask: Optional[Ask]) -> None:
    """Let the user decide about changed settings; returns if the run is to go on with them."""
    anew = f"--restart begins step {step.number} anew, or choose another --output_dir"
    if ask is None:
        raise UserError(
            f"{folder} holds an unfinished run of other settings ({describe(changed)}); "
            f"--resume latest goes on with the new ones, {anew}"
        )
    lines = "".join(f"\n  {describe([change])}" for change in changed)
    if not ask(f"step {step.number} was cut short with other settings:{lines}\nGo on with these?"):
        raise UserError(f"{folder} holds an unfinished run of other settings; {anew}")


def _trained_again(
    found: Found, values: dict[str, Any], made_here: Collection[str]
) -> list[Change]:
    """Models that the step started from and that are no longer what they were then."""
    since = os.path.getmtime(found.folder / MANIFEST)
    again = []
    for key, name in values.items():
        if not key.endswith("model_name_or_path") or not isinstance(name, str):
            continue
        mark = os.path.join(name, COMPLETE)
        if name in made_here or (os.path.exists(mark) and os.path.getmtime(mark) > since):
            again.append((key, name, f"{name}, trained again"))
    return again
