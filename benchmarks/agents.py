"""Compares agents over HTTP with the same game as an environment, rollouts of one process by turns.

    python benchmarks/agents.py [--model FOLDER] [--prompts 4] [--samples 4] [--rounds 5]

An episode has three answers of up to 32 tokens, which also end at a punctuation mark. Both sides
draw the same tokens, but for a draw near the border of two, where other batches round otherwise.
Prints the seconds of a rollout, and the agents' over the environment's.
"""

import json
import time

from report import environment, flags, positive, ratios, spread, take_turns

import dschat.distributed as dist
from dschat import DeepSpeedPPOTrainer, DeepSpeedRLHFEngine, RLHFConfig
from dschat.data.batches import PromptTable
from dschat.data.segments import prompt_text_ids
from dschat.models.tokenizer import load_tokenizer
from dschat.runtime.start import set_seed

TURNS = 3


class Game:
    """Replies to two answers, and rewards all three."""

    def reset(self):
        self.turn = 0

    def step(self, answer):
        self.turn += 1
        return f"Go on, {self.turn}.", float(len(answer)), self.turn == TURNS


async def play(client, prompt):
    """The same game."""
    messages, total = list(prompt), 0.0
    for turn in range(1, TURNS + 1):
        made = await client.chat.completions.create(model="actor", messages=messages)
        total += len(made.choices[0].message.content)
        if made.choices[0].finish_reason == "length":
            break
        said = {"role": "user", "content": f"Go on, {turn}."}
        messages += [made.choices[0].message, said]
    return total


class Side:
    """A trainer whose rollouts are timed."""

    def __init__(self, args, **episodes):
        config = RLHFConfig(
            actor_model_name_or_path=args.model,
            critic_model_name_or_path="",
            advantage_estimator="grpo",
            max_prompt_seq_len=128,
            max_answer_seq_len=300,
            max_turn_tokens=32,
            per_device_generation_batch_size=args.prompts,
            num_samples_per_prompt=args.samples,
            kv_page_size=16,
        )
        config.scores_with_objects = True
        set_seed(config.seed)
        tokenizer = load_tokenizer(args.model, "--model")
        engine = DeepSpeedRLHFEngine(args.model, None, tokenizer, 4, config)
        self.trainer = DeepSpeedPPOTrainer(engine, config, **episodes)
        marks = [i for mark in ".,!?" for i in tokenizer.encode(mark, add_special_tokens=False)]
        with engine.rollout_mode() as generator:
            generator.stop_ids = tuple(sorted({*generator.stop_ids, *marks}))
        said = [f"Tell me about the number {i}." for i in range(args.prompts)]
        chats = [[{"role": "user", "content": text}] for text in said]
        ids = [prompt_text_ids(tokenizer, chat) for chat in chats]
        self.prompts = PromptTable(ids, sources=chats, texts=said)

    def run(self, number):
        """Seconds, turns and tokens of a rollout."""
        began = time.perf_counter()
        self.trainer.generate_experience(self.prompts)
        metrics = self.trainer.metrics
        told = {name: metrics[f"rollout/{name}"] for name in ("turns", "tokens")}
        return {"seconds": time.perf_counter() - began, **told}


def main():
    parser = flags(__doc__, rounds=5)
    parser.add_argument("--model", default="builtin/tiny")
    parser.add_argument("--prompts", type=positive, default=4)
    parser.add_argument("--samples", type=positive, default=4)
    args = parser.parse_args()
    sides = {"environment": Side(args, environment=Game), "agent": Side(args, agent=play)}
    found = take_turns("rollout", sides, args.rounds, lambda seen: f"{seen['seconds']:.3g} s")
    seconds = {side: [seen["seconds"] for seen in rows[1:]] for side, rows in found.items()}
    line = {
        "model": args.model,
        "episodes": args.prompts * args.samples,
        "turns": found["agent"][0]["turns"],
        "tokens": {side: rows[-1]["tokens"] for side, rows in found.items()},
        "seconds": {side: spread(values) for side, values in seconds.items()},
        "agent_over_environment": ratios(seconds["agent"], seconds["environment"]),
    }
    print(json.dumps(line | environment(dist.device())))


if __name__ == "__main__":
    main()
