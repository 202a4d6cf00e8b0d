"""Measures how much of a slow reward function overlaps with generation and scoring.

    python benchmarks/reward_overlap.py
    python benchmarks/reward_overlap.py --sample_s 0.02 --generation_batches 8

Times one iteration's experience (`generate_experience`) of the built-in tiny model with a function
that sleeps ``--sample_s`` per sample: inline (``--reward_pool none``), in one thread, and as a
coroutine; and with a function that returns at once, as the floor. The sides alternate within a
round. Prints medians over rounds and their spread as one JSON line. Weights are random: only time
is measured.
"""

import argparse
import asyncio
import json
import logging
import time
from dataclasses import replace

from report import environment, rounded, spread

import dschat.distributed as dist
from dschat.builtin.chat_rows import builtin_rows
from dschat.builtin.tiny_model import resolve_model
from dschat.config import RLHFConfig
from dschat.data.segments import prompt_text_ids
from dschat.models.tokenizer import load_tokenizer
from dschat.rlhf.engine import DeepSpeedRLHFEngine
from dschat.rlhf.trainer import DeepSpeedPPOTrainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample_s", type=float, default=0.01, help="seconds of sleep per sample")
    parser.add_argument("--generation_batches", type=int, default=4, help="per experience")
    parser.add_argument("--prompts", type=int, default=16, help="per generation batch")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()

    def quick(answers):
        return [0.0] * len(answers)

    def slow(answers):
        time.sleep(args.sample_s * len(answers))
        return [0.0] * len(answers)

    async def waits(answers):
        await asyncio.sleep(args.sample_s * len(answers))
        return [0.0] * len(answers)

    sides = {
        "no_wait": (quick, "none"),
        "in_turn": (slow, "none"),
        "thread": (slow, "thread"),
        "coroutine": (waits, "none"),
    }
    logging.disable(logging.WARNING)
    dist.init()
    path = resolve_model("builtin/tiny")
    tokenizer = load_tokenizer(path, "builtin/tiny")
    config = RLHFConfig(
        advantage_estimator="grpo",
        num_samples_per_prompt=4,
        per_device_generation_batch_size=args.prompts,
        generation_batches=args.generation_batches,
        per_device_training_batch_size=args.prompts,
        max_prompt_seq_len=64,
        max_answer_seq_len=40,
        min_answer_seq_len=40,
    )
    engine = DeepSpeedRLHFEngine(path, None, tokenizer, args=config)
    questions = [row["prompt"] for row in builtin_rows()["train"]]
    count = args.prompts * args.generation_batches
    batch = [
        prompt_text_ids(tokenizer, [{"role": "user", "content": text}])
        for text in questions[:count]
    ]
    trainers = {}
    for name, (function, pool) in sides.items():
        # One worker: measures overlap with generation, not parallel calls.
        args_of_side = replace(config, reward_pool=pool, reward_workers=1)
        trainers[name] = DeepSpeedPPOTrainer(engine, args_of_side, reward_fns=[function])
    times: dict[str, list[float]] = {name: [] for name in sides}
    for round_number in range(args.rounds + 1):
        for name, trainer in trainers.items():
            started = time.perf_counter()
            trainer.generate_experience(batch)
            if round_number:  # the first warms up
                times[name].append(time.perf_counter() - started)
    floor = spread(times["no_wait"])["median"]
    added = {name: spread(values)["median"] - floor for name, values in times.items()}
    line = environment(dist.device()) | {
        "benchmark": "reward_overlap",
        "sample_s": args.sample_s,
        "samples": count * config.num_samples_per_prompt,
        "generation_batches": args.generation_batches,
        "experience_s": {name: spread(values) for name, values in times.items()},
        "hidden_share": {
            name: rounded(1 - added[name] / added["in_turn"]) for name in ("thread", "coroutine")
        },
    }
    print(json.dumps(line))
    for trainer in trainers.values():
        trainer.reward_functions.close()
    dist.shutdown()


if __name__ == "__main__":
    main()
