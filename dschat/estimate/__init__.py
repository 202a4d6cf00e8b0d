"""Estimates memory, hours and dollars of each step before anything loads (``--plan``).

No torch here: `dschat.estimate.report` makes the tables and the lines of the log.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Optional

from dschat.config import CommonConfig, RewardConfig, RLHFConfig, SFTConfig

_CONFIGS: dict[int, type[CommonConfig]] = {1: SFTConfig, 2: RewardConfig, 3: RLHFConfig}


@dataclass(frozen=True)
class PlanRequest:
    """The steps to estimate, the devices they run on, and what to say about time and cost.

    Without ``device_name`` and ``device_memory_gib`` the device is this machine's.
    """

    steps: Mapping[int, Mapping[str, Any]]  # number -> given fields, with ``output_dir``
    num_processes: int
    processes_here: int  # on one machine, which share its host memory
    device_memory_gib: Optional[float] = None  # of the GPU; None: what a ``device_name`` has
    device_name: Optional[str] = None  # of a row in `dschat.estimate.devices`
    price: Optional[float] = None  # dollars of a device hour
    tokens: Optional[Sequence[int]] = None  # mean of a prompt and of an answer; None: the longest
    examples: Optional[int] = None  # of an epoch

    @classmethod
    def from_json(cls, text: str) -> "PlanRequest":
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
        """Output folder of steps 1 and 2 -> the model it is trained from."""
        return {
            str(fields["output_dir"]): fields["model_name_or_path"]
            for number, fields in self.steps.items()
            if number != 3 and fields.get("output_dir") and fields.get("model_name_or_path")
        }

    @property
    def base_models(self) -> set[str]:
        """Every checkpoint that a step loads and no step of the request saves."""
        return {
            fields[key]
            for fields in self.steps.values()
            for key in fields
            if key.endswith("model_name_or_path") and fields[key] not in self.made_from
        }
