"""Defines the task of both sides of `learning.py`: prompts, reward, and the record of a run.

A task is a JSON file; a record is a folder with seconds per rollout and snapshots of the weights.
No dschat or TRL here: each side's interpreter may have only one of them.
"""

import json
import platform
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType

from safetensors.torch import save_file
from torch import Tensor, get_num_threads

RESULT = "result.json"


@dataclass
class Task:
    """One run of one side. N prompts in order: prompts_per_rollout for each rollout."""

    model: str  # folder of the SFT checkpoint
    prompts_per_rollout: int
    samples_per_prompt: int
    steps_per_rollout: int  # optimizer steps
    snapshot_every: int  # rollouts
    settings: dict  # fields of RLHFConfig, or of GRPOConfig
    prompts: list[str]  # N, with the chat template applied
    prompt_ids: list[list[int]]  # N, the tokenized prompts
    references: list[str]  # N right answers
    answers: str = ""  # file that dschat writes its answers to, and TRL trains on

    @classmethod
    def read(cls, path: str | Path) -> "Task":
        return cls(**json.loads(Path(path).read_text()))

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    def rollouts(self) -> Iterator[slice]:
        """The slice of the prompts of each rollout."""
        for start in range(0, len(self.prompts), self.prompts_per_rollout):
            yield slice(start, start + self.prompts_per_rollout)


def exact_match(answers: list[str], reference: list[str]) -> list[float]:
    """1 if the last number of the answer is the reference, else 0, as the recipe's reward."""
    last = [(re.findall(r"\d+", answer) or [""])[-1] for answer in answers]
    return [float(a == r) for a, r in zip(last, reference, strict=True)]


@dataclass
class Recorder:
    """Records the seconds of every rollout with its updates. Saving snapshots does not count.

    Call `start` when everything is loaded, `step` after each rollout's updates, then `finish`.
    """

    folder: Path
    snapshot_every: int
    rows: list[dict[str, float]] = field(default_factory=list)
    _mark: float = 0.0

    def start(self) -> None:
        self._mark = time.perf_counter()

    def step(
        self,
        generate_s: float,
        score_s: float,
        weights: Callable[[], Iterable[tuple[str, Tensor]]],
    ) -> None:
        """Record a rollout, of which ``generate_s`` and ``score_s`` were generation and scoring."""
        step_s = time.perf_counter() - self._mark
        parts = {"generate": generate_s, "score": score_s, "train": step_s - generate_s - score_s}
        self.rows.append({"step": step_s} | parts)
        if len(self.rows) % self.snapshot_every == 0:
            copies = {name: tensor.detach().clone() for name, tensor in weights()}
            save_file(copies, snapshot_path(self.folder, len(self.rows)))
        self._mark = time.perf_counter()

    def finish(self, modules: Iterable[ModuleType]) -> None:
        about = {module.__name__: module.__version__ for module in modules}
        about |= {"python": platform.python_version(), "threads": get_num_threads()}
        (self.folder / RESULT).write_text(json.dumps({"about": about, "rows": self.rows}))


def snapshot_path(folder: Path, rollouts: int) -> Path:
    """The file of the weights after ``rollouts`` rollouts."""
    return folder / f"after_{rollouts:05d}.safetensors"
