"""dschat's side of `learning.py`: the notebook loop over the task's prompts.

python learning_dschat.py TASK.json FOLDER
"""

import json
import sys
from pathlib import Path

import deepspeed
import torch
import transformers
from learning_task import Recorder, Task, exact_match

import dschat.distributed as dist
from dschat import DeepSpeedPPOTrainer, DeepSpeedRLHFEngine
from dschat.config import RLHFConfig
from dschat.data.batches import PromptTable
from dschat.hybrid.weight_stream import weight_stream
from dschat.models.tokenizer import load_tokenizer
from dschat.observability import console
from dschat.rlhf.experience import Experience
from dschat.runtime.deepspeed_engine import unwrap


def main() -> None:
    task, folder = Task.read(sys.argv[1]), Path(sys.argv[2])
    record = Recorder(folder, task.snapshot_every)
    args = RLHFConfig(**task.settings)
    console.setup("warning")
    dist.init()
    transformers.set_seed(args.seed)
    engine = DeepSpeedRLHFEngine(
        actor_model_name_or_path=task.model,
        tokenizer=load_tokenizer(task.model, "--sft_model"),
        num_total_iters=args.max_steps,
        args=args,
    )
    trainer = DeepSpeedPPOTrainer(engine=engine, args=args, reward_fns=[exact_match])

    drawn: list[list[list[int]]] = []
    record.start()
    for rows in task.rollouts():
        columns = {"reference": task.references[rows]}
        prompts = PromptTable(task.prompt_ids[rows], texts=task.prompts[rows], columns=columns)
        out = trainer.generate_experience(prompts)
        trainer.train_rlhf(out)
        if task.answers:
            drawn.append(answer_ids(out))
        record.step(
            trainer.metrics["time/generate_s"],
            trainer.metrics["time/score_s"],
            lambda: weight_stream(unwrap(engine.actor), dist.device()),
        )
    if task.answers:
        Path(task.answers).write_text(json.dumps(drawn))
    record.finish([torch, transformers, deepspeed])
    dist.shutdown()


def answer_ids(e: Experience) -> list[list[int]]:
    """The answers of an experience, prompt-major, EOS included."""
    ends = zip(e.prompt_lengths.tolist(), e.lengths.tolist(), strict=True)
    return [ids[start:end].tolist() for ids, (start, end) in zip(e.input_ids, ends, strict=True)]


if __name__ == "__main__":
    main()
