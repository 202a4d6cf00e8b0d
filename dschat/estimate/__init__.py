"""Before anything loads, a plan: what each step holds on one device, and whether it fits.

The steps' fields and the machine come in; text goes out: a table for ``train.py --plan``, a line a
step for the log. Nothing is loaded or written. This module must not import torch: planning does,
and the line for the log is therefore made in a process of its own, which gives its memory back.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Optional

from dschat.config import CommonConfig, RewardConfig, RLHFConfig, SFTConfig, UserError

_CONFIGS: dict[int, type[CommonConfig]] = {1: SFTConfig, 2: RewardConfig, 3: RLHFConfig}
_TITLES = {SFTConfig: "supervised fine-tuning", RewardConfig: "reward model", RLHFConfig: "RLHF"}
_LONGEST_S = 60.0  # that a run waits for its plan


@dataclass(frozen=True)
class Request:
    """What to plan.

    Attributes:
        steps: the fields given for each step, by its number, ``output_dir`` among them.
        num_processes: of the run.
        processes_here: of them on one machine: they share its host memory.
        device_memory_gib: plan for a GPU of this size; None: for this machine's device.
    """

    steps: Mapping[int, Mapping[str, Any]]
    num_processes: int
    processes_here: int
    device_memory_gib: Optional[float] = None

    @classmethod
    def from_json(cls, text: str) -> "Request":
        values = json.loads(text)
        steps = {int(number): fields for number, fields in values.pop("steps").items()}
        return cls(steps, **values)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def config(self, number: int) -> CommonConfig:
        """Step ``number`` with its defaults."""
        return _CONFIGS[number](**self.steps[number])

    @property
    def made_from(self) -> dict[str, str]:
        """The folders that the steps make -> what each starts from."""
        return {
            str(fields["output_dir"]): fields["model_name_or_path"]
            for number, fields in self.steps.items()
            if number != 3 and fields.get("output_dir") and fields.get("model_name_or_path")
        }

    @property
    def base_models(self) -> set[str]:
        """Every checkpoint that a step names and none of them makes."""
        return {
            fields[key]
            for fields in self.steps.values()
            for key in fields
            if key.endswith("model_name_or_path") and fields[key] not in self.made_from
        }


def title_of(config: CommonConfig) -> str:
    """What a step does, in a word or two."""
    if isinstance(config, RewardConfig) and config.trains_policy:
        return config.loss.upper()
    return _TITLES[type(config)]


def tables(request: Request) -> str:
    """The plan in full. Imports torch.

    Raises:
        UserError: a model whose configuration cannot be had, or settings that DeepSpeed refuses.
    """
    from dschat.estimate.run import tables

    return tables(request)


def log_lines(request: Request) -> list[str]:
    """The plan in short, a line a step. Whatever goes wrong with it is one line too: a run goes on.

    Raises:
        UserError: a step names data or a checkpoint on this machine that it cannot use.
    """
    for name in sorted(request.base_models):
        if not _is_here(name):
            return [f"no plan: the configuration of {name} is not here, and the hub is off line"]
    command = [sys.executable, "-m", "dschat.estimate"]
    package = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    try:
        done = subprocess.run(
            command,
            input=request.to_json(),
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=_LONGEST_S,
        )
    except subprocess.TimeoutExpired:
        return [f"no plan: it was not there within {_LONGEST_S:.0f} s; --plan shows more"]
    lines = [line for line in done.stdout.splitlines() if line.startswith(("plan:", "no plan:"))]
    if lines and done.returncode == 0:
        return lines
    reason = (done.stderr.strip() or "it ended without a word").splitlines()[-1]
    if done.returncode == 2 and reason.startswith("error: "):
        raise UserError(reason.removeprefix("error: "))
    return [*lines, f"no plan: {reason}"]


def _is_here(name: str) -> bool:
    """Whether a configuration may be had: a folder with one, or a hub that can be asked."""
    if name.startswith("builtin/"):
        return True
    folder = Path(os.path.expanduser(name))
    if os.path.isdir(folder):
        try:
            return "model_type" in json.loads((folder / "config.json").read_text("utf-8"))
        except (ValueError, TypeError, RecursionError):
            return True  # broken, which planning says
        except OSError:
            return False
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() not in ("1", "ON", "YES", "TRUE"):
        return True
    home = os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or Path(home, "hub"))
    return os.path.isdir(hub / f"models--{name.replace('/', '--')}")


__all__ = ["Request", "UserError", "log_lines", "tables"]
