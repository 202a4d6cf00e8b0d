"""Whether a step goes on from the checkpoints in its folder, and what may be different then.

A step's configuration comes in, and its output folder; which settings a checkpoint records, which
of them have changed, and an error for a run that would be lost, go out. No torch: ``train.py`` asks
before anything loads. It must not know what is in a checkpoint.
"""

import dataclasses
from pathlib import Path
from typing import Any

from dschat.checkpoint.manifest import FOLDER, Found, changed_settings, step_folders
from dschat.config import CommonConfig, UserError

# What may change without a question: no number that training computes depends on it.
FREE = {
    # where, and how to begin
    "output_dir": "the folder may have moved",
    "overwrite_output_dir": "is about beginning",
    "resume": "is about going on",
    # how much is kept and told
    "save_steps": "when to save",
    "save_total_limit": "how much of it to keep",
    "logging_steps": "what is recorded",
    "enable_tensorboard": "where it is recorded",
    "enable_wandb": "where it is recorded",
    "log_level": "what is printed",
    "disable_tqdm": "what is printed",
    "print_answers": "what is printed",
    "print_answers_interval": "what is printed",
    # how much is endured
    "max_bad_steps": "when to give up",
    "reward_retries": "when to give up",
    "reward_timeout_s": "when to give up",
    # the machine
    "local_rank": "set by the launcher",
    "reward_workers": "how many calls at a time",
}
Change = tuple[str, Any, Any]  # name, old, new


def settings_of(config: CommonConfig) -> dict[str, Any]:
    """What a checkpoint records of a run, and another run must have equal to go on from it."""
    values = dataclasses.asdict(config)
    return {name: value for name, value in values.items() if name not in FREE}


def changes(found: Found, config: CommonConfig) -> list[Change]:
    """The settings of ``config`` that are not those of the checkpoint's run. A knob that the
    checkpoint is too old to know has changed if it has not its default.
    """
    defaults = settings_of(type(config)())
    changed = changed_settings(found, settings_of(config))
    return [
        (name, old, new)
        for name, old, new in changed
        if name not in FREE and (name in found.settings or new != defaults.get(name))
    ]


def describe(changed: list[Change]) -> str:
    """``seed: 1 -> 2; max_steps: 0 -> 10``"""
    return "; ".join(f"{name}: {_shown(old)} -> {_shown(new)}" for name, old, new in changed)


def check_start(config: CommonConfig) -> None:
    """``UserError`` where a step would begin in the folder of one that was cut short, with neither
    --resume nor --overwrite_output_dir to say what becomes of that.
    """
    assert config.output_dir is not None
    folders = [path.name for path in step_folders(Path(config.output_dir) / FOLDER)]
    if folders and not config.resume and not config.overwrite_output_dir:
        raise UserError(
            f"--output_dir {config.output_dir} holds an unfinished run, with {FOLDER}/{folders[0]}"
            "; go on from there with --resume, begin anew with --overwrite_output_dir, or choose "
            "another"
        )


def _shown(value: Any) -> str:
    """As a flag would have it, or nearly."""
    if value is None:
        return "none"
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value)) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value) or "none"
