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

ratio_*: without the feature / with it, of the medians.
"""

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from report import note, spread
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


@dataclass
class Setting:
    """``scale``: of all numbers of tokens; ``rows``: prompts of alike and partial."""

    module: nn.Module
    device: torch.device
    rounds: int
    scale: float = 1.0
    rows: int = 16
    actor: str | None = None
    timings: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def tokens(self, *numbers: int) -> tuple[int, ...]:
        return tuple(max(2, round(self.scale * n)) for n in numbers)

    def prompts(self, count: int, length: int, seed: int) -> list[list[int]]:
        ids = range(3, self.module.config.vocab_size)
        draw = random.Random(seed)
        return [draw.choices(ids, k=length) for _ in range(count)]

    def questions(self, number: int) -> list[list[int]]:
        """Other ``rows`` questions of arithmetic for each number."""
        assert self.actor is not None
        texts = [row["prompt"] for row in arithmetic_rows()["train"]]
        tokenizer = AutoTokenizer.from_pretrained(self.actor)
        return tokenizer(texts[number * self.rows :][: self.rows])["input_ids"]

    def engine(self, num_seqs: int, length: int, **options: object) -> InferenceEngine:
        sizes = EngineConfig(max_num_seqs=num_seqs, max_seq_len=length, **options)
        made = InferenceEngine(self.module.config, self.module.dtype, self.device, sizes)
        made.weights.load(weight_stream(self.module, self.device))
        return made

    def record(self, number: int, side: str, name: str, seconds: float) -> None:
        """The first round, 0, is the warm-up."""
        if number:
            self.timings.setdefault(side, {}).setdefault(name, []).append(seconds)
        note(f"round {number} of {self.rounds}, {side}: {name} {seconds:.4g}")

    def line(self) -> dict:
        """Spreads, and the ratios of the side without the feature to the one with it."""
        line: dict = {
            side: {name: spread(values) for name, values in named.items()}
            for side, named in self.timings.items()
        }
        for name in self.timings["with"]:
            ratio = line["without"][name]["median"] / line["with"][name]["median"]
            line[f"ratio_{name.removesuffix('_s')}"] = round(ratio, 3)
        return line


def measure(name: str, args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> dict:
    """The fields of the case's line."""
    module = make_module(Case(args.model or MODEL, 0, 0, 0, 0), device, dtype)
    setting = Setting(module, device, args.rounds, args.scale, args.rows, args.actor)
    return {"model": args.actor or args.model or MODEL} | CASES[name](setting)


def prefix(s: Setting) -> dict:
    common, own, new = s.tokens(512, 32, 16)
    (system,) = s.prompts(1, common, seed=0)
    prompts = [system + ids for ids in s.prompts(64, own, seed=1)]
    sides = _with_and_without_prefixes(s, 64, common + own + new)
    sampling = SamplingParams(max_new_tokens=new, ignore_eos=True)
    tokens = {}
    for number in range(s.rounds + 1):
        for side, engine in sides.items():
            engine.forget_prefixes()
            wall_s = _timed(engine.generate, prompts, sampling)[0]
            tokens[side] = engine.stats.prefill_tokens
            s.record(number, side, "prefill_s", engine.stats.prefill_s)
            s.record(number, side, "wall_s", wall_s)
    ratio = tokens["without"] / tokens["with"]
    return s.line() | {"prefill_tokens": tokens, "ratio_tokens": ratio}


def chat(s: Setting) -> dict:
    asked, new = s.tokens(150, 64)
    sides = _with_and_without_prefixes(s, 1, 5 * (asked + new))
    sampling = SamplingParams(max_new_tokens=new, temperature=0.0, ignore_eos=True)
    for number in range(s.rounds + 1):
        turns = s.prompts(5, asked, seed=number)
        for side, engine in sides.items():
            engine.forget_prefixes()
            history: list[int] = []
            for turn, ids in enumerate(turns, start=1):
                history += ids
                started = time.perf_counter()
                answer = engine.stream(history, sampling)
                history.append(next(answer))
                s.record(number, side, f"turn{turn}_s", time.perf_counter() - started)
                history += answer
    return s.line()


def _with_and_without_prefixes(
    s: Setting, num_seqs: int, length: int
) -> dict[str, InferenceEngine]:
    made = {side: s.engine(num_seqs, length, page_size=PAGE) for side in ("with", "without")}
    made["without"].cache.keeps_prefixes = False
    return made


def alike(s: Setting) -> dict:
    prompt, new = (16, 12) if s.actor else s.tokens(32, 64)
    sizes = {"max_num_seqs": 8 * s.rows, "max_seq_len": prompt + new}
    sides = {
        side: InferenceEngine.from_pretrained(s.actor, **sizes)
        if s.actor
        else s.engine(8 * s.rows, prompt + new)
        for side in ("with", "without")
    }
    sides["without"]._samples_apart = True  # as for captured steps
    rows = {}
    for number in range(s.rounds + 1):
        prompts = s.questions(number) if s.actor else s.prompts(s.rows, prompt, seed=number)
        sampling = SamplingParams(
            max_new_tokens=new, n=8, temperature=float(bool(s.actor)), seed=number
        )
        answers = []
        for side, engine in list(sides.items())[:: 1 if number % 2 else -1]:
            seconds, answer = _timed(engine.generate, prompts, sampling)
            answers.append(answer)
            rows[side] = engine.stats.decoded_rows
            s.record(number, side, "wall_s", seconds)
        assert answers[0].token_ids == answers[1].token_ids, "answers differ"
    return s.line() | {"rows": rows}


def partial(s: Setting) -> dict:
    prompt, mean, longest = s.tokens(64, 64, 320)
    vocab = s.module.config.vocab_size
    stops = tuple(range(3, 3 + max(1, vocab // mean)))  # one of them is drawn every `mean` tokens
    extra = s.rows // 2
    engines = {side: s.engine(s.rows + extra, prompt + longest) for side in ("with", "without")}
    under_way: list[OpenPrompt] = []
    for number in range(s.rounds + 1):
        sampling = SamplingParams(max_new_tokens=longest, stop_token_ids=stops, seed=number)
        prompts = s.prompts(s.rows, prompt, seed=number)
        seconds = _timed(engines["without"].generate, prompts, sampling)[0]
        s.record(number, "without", "answer_s", seconds / s.rows)
        under_way += map(OpenPrompt, prompts)
        if not number:
            under_way += map(OpenPrompt, s.prompts(extra, prompt, seed=s.rounds + 1))
        numbers = list(range(len(under_way)))
        seconds, _ = _timed(advance, engines["with"], under_way, sampling, numbers, s.rows)
        done = [p for p in under_way if p.is_complete][: s.rows]
        under_way = [p for p in under_way if all(p is not d for d in done)]
        s.record(number, "with", "answer_s", seconds / len(done))
    return s.line() | {"rows": s.rows}


def _timed(work: Callable[..., Any], *args: object) -> tuple[float, Any]:
    """Seconds and result of ``work(*args)``."""
    started = time.perf_counter()
    result = work(*args)
    return time.perf_counter() - started, result


CASES: dict[str, Callable[[Setting], dict]] = {
    "prefix": prefix,
    "chat": chat,
    "alike": alike,
    "partial": partial,
}
