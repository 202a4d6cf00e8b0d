"""TRL's side of `learning.py`: GRPOTrainer over the task's prompts.

    python learning_trl.py TASK.json FOLDER

No dschat here: any interpreter with TRL runs it.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from learning_task import Recorder, Task, exact_match
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class TimedTrainer(GRPOTrainer):
    """GRPOTrainer that times generation, and generation plus scoring.

    It overrides methods of TRL 1.16.
    """

    generate_s = experience_s = 0.0
    answers: list[list[list[int]]] | None = None  # of each rollout, to replace its own

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        batch = super()._generate_and_score_completions(*args, **kwargs)
        self.experience_s += time.perf_counter() - started
        return batch

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        completions = super()._generate(*args, **kwargs)
        self.generate_s += time.perf_counter() - started
        return completions

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        if self.answers is None:
            return super()._generate_single_turn(*args, **kwargs)
        return self.answers.pop(0), None


class OnStep(TrainerCallback):
    """Starts the recorder, and records every rollout."""

    def __init__(self, record: Recorder, steps_per_rollout: int) -> None:
        self.record, self.steps_per_rollout = record, steps_per_rollout
        self.trainer: TimedTrainer | None = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.record.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.steps_per_rollout:
            return
        trainer = self.trainer
        score_s = trainer.experience_s - trainer.generate_s
        self.record.step(trainer.generate_s, score_s, trainer.model.named_parameters)
        trainer.generate_s = trainer.experience_s = 0.0


def reward(completions: list[str], reference: list[str], **_: Any) -> list[float]:
    """The task's reward, with TRL's argument names."""
    return exact_match(completions, reference)


def main() -> None:
    task, folder = Task.read(sys.argv[1]), Path(sys.argv[2])
    record = Recorder(folder, task.snapshot_every)
    on_step = OnStep(record, task.steps_per_rollout)
    trainer = TimedTrainer(
        model=task.model,
        reward_funcs=reward,
        args=GRPOConfig(output_dir=str(folder), **task.settings),
        train_dataset=Dataset.from_dict({"prompt": task.prompts, "reference": task.references}),
        callbacks=[on_step],
    )
    if task.answers:
        trainer.answers = json.loads(Path(task.answers).read_text())
    on_step.trainer = trainer
    trainer.train()
    record.finish([torch, transformers, trl])


if __name__ == "__main__":
    main()
