"""Measures what a rollout need not compute again: the cases of `rollout.py` with two engines.

Both engines have the same weights; one of them has the feature of the case. They take turns after a
warm-up, on the same prompts.

- prefix: 64 prompts of 512 common and 32 own tokens, 16 new ones, with the prefix cache and
  without: prefill_tokens computed, prefill_s, wall_s of the whole call.
- chat: time to the first token of each turn, which has 150 new tokens and an answer of 64.
- alike: eight answers to each of --rows prompts, computed as one row while they are the same, and
  as a row each. With --actor, a checkpoint, the prompts are questions of builtin/arithmetic; else
  random ids, answered greedily, so that all eight are the same. rows: of the decode steps.
- partial: prompts with answers of geometric lengths, of 64 tokens on average and 320 at most.
  answer_s: seconds of a rollout for each finished answer, in whole rollouts and in partial ones.

ratio: without the feature / with it, of the medians.
"""

import argparse
import random
import time
from dataclasses import dataclass
from typing import Any

import torch
from report import figures, rounded, spread, take_turns
from rollout_sides import make_module
from rollout_workloads import Case
from torch import nn
from transformers import AutoTokenizer

from dschat.builtin.arithmetic import arithmetic_rows
from dschat.hybrid.weight_stream import weight_stream
from dschat.inference import EngineConfig, InferenceEngine, SamplingParams
from dschat.rlhf.rollout_policies import OpenPrompt, advance

PAGE = 32
MODEL = "llama-384x6"
Measured = dict[str, float]


@dataclass
class Setting:
    """``scale``: of all numbers of tokens; ``rows``: prompts of alike and partial."""

    module: nn.Module
    device: torch.device
    scale: float = 1.0
    rows: int = 16
    actor: str | None = None

    def tokens(self, *numbers: int) -> tuple[int, ...]:
        return tuple(max(2, round(self.scale * n)) for n in numbers)

    def prompts(self, count: int, length: int, seed: int) -> list[list[int]]:
        ids = range(3, self.module.config.vocab_size)
        draw = random.Random(seed)
        return [draw.choices(ids, k=length) for _ in range(count)]

    def engine(self, num_seqs: int, length: int, **options: Any) -> InferenceEngine:
        if self.actor:
            return InferenceEngine.from_pretrained(
                self.actor, max_num_seqs=num_seqs, max_seq_len=length
            )
        sizes = EngineConfig(max_num_seqs=num_seqs, max_seq_len=length, **options)
        made = InferenceEngine(self.module.config, self.module.dtype, self.device, sizes)
        made.weights.load(weight_stream(self.module, self.device))
        return made


class Side:
    """A side of a case. ``has``: whether its engine has the feature."""

    def __init__(self, setting: Setting, has: bool) -> None:
        self.s, self.has = setting, has
        self.start()  # of the case

    def generate(self, prompts: list[list[int]], sampling: SamplingParams) -> float:
        """Seconds; keeps the answers."""
        started = time.perf_counter()
        self.answers = self.engine.generate(prompts, sampling)
        return time.perf_counter() - started

    def caching(self, num_seqs: int, length: int) -> InferenceEngine:
        engine = self.s.engine(num_seqs, length, page_size=PAGE)
        engine.cache.keeps_prefixes = self.has
        return engine


class Prefix(Side):
    def start(self) -> None:
        common, own, self.new = self.s.tokens(512, 32, 16)
        (system,) = self.s.prompts(1, common, seed=0)
        self.prompts = [system + ids for ids in self.s.prompts(64, own, seed=1)]
        self.engine = self.caching(64, common + own + self.new)

    def run(self, number: int) -> Measured:
        self.engine.forget_prefixes()
        seconds = self.generate(self.prompts, SamplingParams(self.new, ignore_eos=True))
        stats = self.engine.stats
        measured = {"prefill_tokens": stats.prefill_tokens, "prefill_s": stats.prefill_s}
        return measured | {"wall_s": seconds}


class Chat(Side):
    def start(self) -> None:
        self.asked, self.new = self.s.tokens(150, 64)
        self.engine = self.caching(1, 5 * (self.asked + self.new))

    def run(self, number: int) -> Measured:
        self.engine.forget_prefixes()
        history: list[int] = []
        measured = {}
        sampling = SamplingParams(self.new, temperature=0.0, ignore_eos=True)
        for turn, ids in enumerate(self.s.prompts(5, self.asked, seed=number), start=1):
            history += ids
            started = time.perf_counter()
            answer = self.engine.stream(history, sampling)
            history.append(next(answer))
            measured[f"turn{turn}_s"] = time.perf_counter() - started
            history += answer
        return measured


class Alike(Side):
    def start(self) -> None:
        self.prompt, self.new = (16, 12) if self.s.actor else self.s.tokens(32, 64)
        self.engine = self.s.engine(8 * self.s.rows, self.prompt + self.new)
        self.engine._samples_apart = not self.has  # as for captured steps

    def run(self, number: int) -> Measured:
        sampling = SamplingParams(self.new, n=8, temperature=float(bool(self.s.actor)), seed=number)
        if self.s.actor:
            texts = [row["prompt"] for row in arithmetic_rows()["train"]]
            chosen = texts[number * self.s.rows :][: self.s.rows]
            prompts = AutoTokenizer.from_pretrained(self.s.actor)(chosen)["input_ids"]
        else:
            prompts = self.s.prompts(self.s.rows, self.prompt, seed=number)
        seconds = self.generate(prompts, sampling)
        return {"wall_s": seconds, "rows": self.engine.stats.decoded_rows}


class Partial(Side):
    def start(self) -> None:
        self.prompt, mean, self.longest = self.s.tokens(64, 64, 320)
        vocab = self.s.module.config.vocab_size
        # One of them is drawn every `mean` tokens.
        self.stops = tuple(range(3, 3 + max(1, vocab // mean)))
        extra = self.s.rows // 2
        self.engine = self.s.engine(self.s.rows + extra, self.prompt + self.longest)
        self.under_way = list(map(OpenPrompt, self.s.prompts(extra, self.prompt, seed=-1)))

    def run(self, number: int) -> Measured:
        sampling = SamplingParams(self.longest, stop_token_ids=self.stops, seed=number)
        prompts = self.s.prompts(self.s.rows, self.prompt, seed=number)
        if not self.has:
            return {"answer_s": self.generate(prompts, sampling) / self.s.rows}
        self.under_way += map(OpenPrompt, prompts)
        numbers = list(range(len(self.under_way)))
        started = time.perf_counter()
        advance(self.engine, self.under_way, sampling, numbers, self.s.rows)
        seconds = time.perf_counter() - started
        done = [p for p in self.under_way if p.is_complete][: self.s.rows]
        self.under_way = [p for p in self.under_way if all(p is not d for d in done)]
        return {"answer_s": seconds / len(done)}


CASES: dict[str, type[Side]] = {
    "prefix": Prefix,
    "chat": Chat,
    "alike": Alike,
    "partial": Partial,
}


def measure(name: str, args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> dict:
    """The fields of the case's line."""
    module = make_module(Case(args.model or MODEL, 0, 0, 0, 0), device, dtype)
    setting = Setting(module, device, args.scale, args.rows, args.actor)
    return {"model": args.actor or args.model or MODEL} | compare(name, setting, args.rounds)


def compare(name: str, setting: Setting, rounds: int) -> dict:
    """Spreads of both sides, and their ratios."""
    sides = {side: CASES[name](setting, side == "with") for side in ("with", "without")}
    line: dict[str, Any] = {}
    for side, (_, *measured) in take_turns(name, sides, rounds, figures).items():
        line[side] = {key: spread([m[key] for m in measured]) for key in measured[0]}
    if name == "alike":
        assert sides["with"].answers.token_ids == sides["without"].answers.token_ids
    ratio = {k: v["median"] / line["with"][k]["median"] for k, v in line["without"].items()}
    return line | {"ratio": {key: rounded(value) for key, value in ratio.items()}}
