"""What both sides of `learning.py` get and give back: a task, its reward, a record of the run.

A JSON file comes in; a folder with seconds per rollout and snapshots of the weights goes out. It
must not know dschat or TRL: the interpreter that reads it may have one of the two alone.
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
    prompts: list[str]  # N, as the tokenizer reads them, template included
    prompt_ids: list[list[int]]  # N, what that gives
    references: list[str]  # N right answers
    answers: str = ""  # file that dschat's answers go into, and TRL takes in place of its own

    @classmethod
    def read(cls, path: str | Path) -> "Task":
        return cls(**json.loads(Path(path).read_text()))

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    def rollouts(self) -> Iterator[slice]:
        """The places of each rollout's prompts."""
        for start in range(0, len(self.prompts), self.prompts_per_rollout):
            yield slice(start, start + self.prompts_per_rollout)


def exact_match(answers: list[str], reference: list[str]) -> list[float]:
    """1 where the answer's last number is the reference, else 0: what the recipe rewards too."""
    last = [(re.findall(r"\d+", answer) or [""])[-1] for answer in answers]
    return [float(a == r) for a, r in zip(last, reference, strict=True)]


@dataclass
class Recorder:
    """Notes what every rollout took, its updates included; setting weights aside does not count.

    `start` it when everything is loaded, call `step` after each rollout's updates, `finish` it.
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
        """One rollout is done: of its seconds, so many were generation and scoring."""
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
    """Where the weights after so many rollouts lie."""
    return folder / f"after_{rollouts:05d}.safetensors"
