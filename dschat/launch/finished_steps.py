"""Compares a finished step with the settings that train.py would train it with.

A step's training_config.yaml has its settings. Its COMPLETE file has their context: the working
directory, the number of processes, the precision of `dtype` auto, and fingerprints of data and
models. Older versions wrote an empty COMPLETE; such steps are compared by their settings alone.
"""

import json
import os
from collections.abc import Collection
from dataclasses import asdict, dataclass, fields
from itertools import zip_longest
from typing import Any, Optional

from dschat.checkpoint.compatibility import (
    CHECKED,
    Change,
    contents_of,
    describe,
    reads_model,
    step_sizes,
)
from dschat.checkpoint.fingerprint import fingerprint
from dschat.config import CommonConfig, UserError, parser
from dschat.config.fields import of_result
from dschat.launch.recipe import TrainingStep
from dschat.launch.steps import BASE
from dschat.observability.metrics_log import SETTINGS
from dschat.runtime.output_dir import COMPLETE


@dataclass
class _Run:
    """The settings of a step that was trained, or would be, and their context."""

    settings: dict[str, Any]
    contents: dict[str, str]  # setting -> fingerprint of the local files it names
    num_processes: int
    working_directory: str
    auto_dtype: str = ""  # the precision of `dtype` auto, where it is known

    def place(self, name: str) -> str:
        """The real path of ``name``; relative to OUT if inside, since OUT may be moved."""
        path = os.path.realpath(os.path.join(self.working_directory, os.path.expanduser(name)))
        out = os.path.join(self.working_directory, self.settings["output_dir"], os.pardir)
        inside = os.path.relpath(path, os.path.realpath(out))
        return path if inside.startswith(os.pardir) else os.path.join("OUT", inside)


def check_finished(
    step: TrainingStep,
    config: CommonConfig,
    compared: Optional[Collection[str]],
    num_processes: int,
    reuse: bool,
) -> list[str]:
    """Refuse a finished step in ``config.output_dir`` with other settings, or ``reuse`` it.

    ``compared``: names of the fields to compare; None: all. Returns a line for the user if a step
    with other settings is reused.

    Raises:
        UserError: the settings differ, and not ``reuse``.
    """
    folder, changed = config.output_dir, describe(differences(config, compared, num_processes))
    if not changed:
        return []
    if reuse:
        return [f"step {step.number} is reused from {folder} with other settings ({changed})"]
    again = f"--step{step.number}.overwrite_output_dir"
    if compared is not None:
        again += f", with {step.number} in --step,"
    raise UserError(
        f"{folder} is finished, with other settings ({changed}); --reuse uses it as it is, "
        f"{again} trains it again; or choose another --output_dir"
    )


def differences(
    config: CommonConfig, compared: Optional[Collection[str]], num_processes: int
) -> list[Change]:
    """Settings of the finished step in ``config.output_dir`` that differ: those of its result
    (`of_result`), the size of a step over all processes, the contents of files and models. Ignored
    are the spelling of paths and moved folders.
    """
    then = _recorded(config, num_processes)
    if then is None:
        return []
    settings = json.loads(json.dumps(asdict(config)))
    now = _Run(settings, contents_of(config), num_processes, os.getcwd())
    counted = of_result(type(config), then.settings, settings) - CHECKED
    changed = []
    if compared is None or CHECKED & set(compared):
        changed = _changed_sizes(type(config), then, now)
    for f in fields(config):
        name, old, new = f.name, then.settings[f.name], settings[f.name]
        is_left_out = name == BASE and not new if compared is None else name not in compared
        if is_left_out or name not in counted:
            continue
        if name == "dtype":
            same = old == new or {old, new} == {"auto", then.auto_dtype}
        elif not (f.metadata.get("reads") == "files" or reads_model(name)):
            same = old == new
        elif same := _same_files(name, then, now):
            prints = {run.contents[name] for run in (then, now) if name in run.contents}
            same, new = len(prints) < 2, f"{' '.join(_words(new))}, changed since"
        if not same:
            changed.append((name, old, new))
    return changed


def _recorded(config: CommonConfig, num_processes: int) -> Optional[_Run]:
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
    content = json.loads(json.dumps(parser.read_yaml(file), default=str))
    defaults = json.loads(json.dumps(asdict(type(config)(output_dir=config.output_dir))))
    return _Run(
        {name: content.get(name, default) for name, default in defaults.items()},
        record.get("contents", {}),
        record.get("num_processes", num_processes),
        record.get("working_directory", os.getcwd()),
        record.get("auto_dtype", ""),
    )


def _changed_sizes(config_class: type[CommonConfig], then: _Run, now: _Run) -> list[Change]:
    """The sizes of a step that differ, as `check_step_size` of an unfinished one compares them."""
    old, new = (step_sizes(config_class(**run.settings), run.num_processes) for run in (then, now))
    return [
        (unit, size, new[unit, flags])
        for (unit, flags), size in old.items()
        if size != new[unit, flags]
    ]


def _same_files(name: str, then: _Run, now: _Run) -> bool:
    """Whether a setting names the same files, in the same place or moved without changes."""
    moved = then.contents.get(name) == now.contents.get(name) is not None
    pairs = zip_longest(_words(then.settings[name]), _words(now.settings[name]), fillvalue="")
    return all(
        old == new
        or then.place(old) == now.place(new)
        or (moved and os.path.basename(old) == os.path.basename(new) and fingerprint([new]))
        for old, new in pairs
    )


def _words(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value or ())
