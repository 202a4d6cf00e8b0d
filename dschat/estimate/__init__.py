"""Estimates what each step will hold on one device, before anything loads.

No torch here: ``tables`` imports what does the work.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Optional

from dschat.config import CommonConfig, RewardConfig, RLHFConfig, SFTConfig

_CONFIGS: dict[int, type[CommonConfig]] = {1: SFTConfig, 2: RewardConfig, 3: RLHFConfig}
_TITLES = {SFTConfig: "supervised fine-tuning", RewardConfig: "reward model", RLHFConfig: "RLHF"}


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
