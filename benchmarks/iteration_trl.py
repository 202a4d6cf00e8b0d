"""TRL's side of `iteration.py`: GRPOTrainer, a round for every line on stdin.

    python iteration_trl.py TASK.json

No dschat here: any interpreter with TRL runs it. It overrides methods of TRL 1.16.
"""

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from iteration_worker import claim_stdout
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class TimedTrainer(GRPOTrainer):
    """Times generation, and generation plus scoring; trains on given answers.

    It generates to the maximum length: random weights hardly ever draw EOS.
    """

    generate_s = experience_s = 0.0
    answers: list[list[list[int]]]  # of each rollout

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        batch = super()._generate_and_score_completions(*args, **kwargs)
        self.experience_s += time.perf_counter() - started
        return batch

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        super()._generate_single_turn(*args, **kwargs)
        self.generate_s += time.perf_counter() - started
        return self.answers.pop(0), None


class Turns(TrainerCallback):
    """Waits for a line before each rollout, and replies after its last optimizer step."""

    def __init__(self, replies: Any, steps_per_rollout: int) -> None:
        self.replies, self.steps_per_rollout = replies, steps_per_rollout
        self.trainer: TimedTrainer | None = None
        self.started = 0.0

    def reply(self, message: dict[str, Any]) -> None:
        peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # KiB on Linux
        print(json.dumps(message | {"peak_gib": peak_gib}), file=self.replies, flush=True)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.reply({"threads": torch.get_num_threads()})

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.steps_per_rollout == 0:
            control.should_training_stop = not sys.stdin.readline()
            self.started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self.steps_per_rollout:
            return
        trainer, seconds = self.trainer, time.perf_counter() - self.started
        parts = {
            "generate_s": trainer.generate_s,
            "score_s": trainer.experience_s - trainer.generate_s,
            "train_s": seconds - trainer.experience_s,
        }
        trainer.generate_s = trainer.experience_s = 0.0
        self.reply(parts | {"iteration_s": seconds, "losses": {}})


def parity_reward(completions: list[str], **_: Any) -> list[float]:
    """`iteration_cases.parity_reward`, with TRL's argument names."""
    words = [completion.split() for completion in completions]
    return [sum(int(word[1:]) % 2 == 0 for word in row) / len(row) for row in words]


def main() -> None:
    replies, task = claim_stdout(), json.loads(Path(sys.argv[1]).read_text())
    turns = Turns(replies, task["steps_per_rollout"])
    turns.trainer = trainer = TimedTrainer(
        model=task["model"],
        reward_funcs=parity_reward,
        args=GRPOConfig(output_dir=task["folder"], **task["settings"]),
        train_dataset=Dataset.from_dict({"prompt": task["prompts"]}),
        callbacks=[turns],
    )
    trainer.answers = task["answers"]
    trainer.train()


if __name__ == "__main__":
    main()
